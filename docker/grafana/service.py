"""The board *service*: requests, the speed of their answers, and the work of the engine."""

from panels import (
    CHOSEN,
    CRITICAL,
    HERE,
    WARNING,
    Board,
    Panel,
    Query,
    Row,
    buckets,
    increase,
    mean,
    percentiles,
    quantile,
    rate,
    ratio,
    value,
)

TTFT = "quire_time_to_first_token_seconds"
ITL = "quire_inter_token_latency_seconds"
QUEUE = "quire_request_queue_seconds"
DURATION = "quire_request_duration_seconds"
HTTP = "quire_http_request_duration_seconds"
STEP = "quire_step_seconds"
SEQUENCES = "quire_step_sequences"
ERRORS = f"max (quire:request_errors:ratio_rate5m{{{CHOSEN}}})"
BROKEN = f"max (quire:broken_answers:ratio_rate5m{{{CHOSEN}}})"
HIT_RATIO = ratio("quire_prompt_tokens_cached_total", "quire_prompt_tokens_submitted_total")
STATUS_COLORS = {"200": "green", "400": "yellow", "429": "orange", "500": "red", "503": "red"}

NOW = Row(
    "Now",
    [
        Panel(
            "Up", "Instances that answered the newest scrape.", "short",
            [Query(value("up", chosen=HERE), "up")], kind="stat", width=4, height=4,
        ),
        Panel(
            "Running", "Sequences that have memory and get tokens in every step.", "short",
            [Query(value("quire_requests_running"), "running")], kind="stat", width=4, height=4,
        ),
        Panel(
            "Waiting", "Requests that wait for a place; beyond the queue's limit they get 429.",
            "short", [Query(value("quire_requests_waiting"), "waiting")], kind="stat", width=4,
            height=4, thresholds=[(16, WARNING), (64, CRITICAL)],
        ),
        Panel(
            "First token, p95", "Nineteen of twenty requests had their first token by then.", "s",
            [Query(quantile(0.95, TTFT), "p95")], kind="stat", width=4, height=4,
            thresholds=[(10, WARNING), (30, CRITICAL)],
        ),
        Panel(
            "Generated", "Tokens of answers per second, of all sequences together.", "short",
            [Query(rate("quire_generated_tokens_total"), "tokens/s")], kind="stat", width=4,
            height=4,
        ),
        Panel(
            "Errors", "Answers 5xx, and answers that broke off, among all of five minutes.",
            "percentunit", [Query(ERRORS, "5xx"), Query(BROKEN, "broken off")], kind="stat",
            width=4, height=4, maximum=1, thresholds=[(0.01, WARNING), (0.05, CRITICAL)],
        ),
    ],
)  # fmt: skip

REQUESTS = Row(
    "Requests",
    [
        Panel(
            "Requests by status", "Answers per second. A stream counts when it begins.", "reqps",
            [Query(rate("quire_requests_total", "status"), "{{status}}")], stacked=True,
            colors=STATUS_COLORS,
        ),
        Panel(
            "Requests by endpoint", "Answers per second, by route.", "reqps",
            [Query(rate("quire_requests_total", "endpoint"), "{{endpoint}}")], stacked=True,
        ),
        Panel(
            "Answers by how they ended",
            "error: an event in the stream says why. aborted: the client left, or was too slow.",
            "reqps", [Query(rate("quire_requests_finished_total", "reason"), "{{reason}}")],
            stacked=True, colors={"error": "red"},
        ),
        Panel(
            "Refusals by reason",
            "Requests and connections that were not let in. queue_full and key_share are told to "
            "come again (429).",
            "reqps", [Query(rate("quire_refused_requests_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Panel(
            "Errors", "Share of answers 5xx, and of answers that ended with an error event.",
            "percentunit", [Query(ERRORS, "5xx"), Query(BROKEN, "broken off")], maximum=1,
            thresholds=[(0.05, CRITICAL)],
        ),
        Panel(
            "Open connections", "Sockets of clients, idle ones included.", "short",
            [Query(value("quire_open_connections"), "open")],
        ),
    ],
)  # fmt: skip

LATENCY = Row(
    "Latency",
    [
        Panel(
            "Time to first token", "From the request's arrival, queue and prompt included.", "s",
            percentiles(TTFT), thresholds=[(30, CRITICAL)],
        ),
        Panel(
            "Time to first token, all of it",
            "How many requests fell into each span: two bands mean that some prompts were cached.",
            "s", [Query(buckets(TTFT), "{{le}}")], kind="heatmap", width=16,
        ),
        Panel(
            "Time between tokens", "What a reader of a stream sees between two tokens.", "s",
            percentiles(ITL),
        ),
        Panel(
            "Time between tokens, all of it",
            "Slow bands are steps that carried a piece of somebody's prompt.", "s",
            [Query(buckets(ITL), "{{le}}")], kind="heatmap", width=16,
        ),
        Panel(
            "Time in the queue", "Until a request had memory and a place in the batch.", "s",
            percentiles(QUEUE),
        ),
        Panel(
            "Whole answers", "From a request's arrival to its last token.", "s",
            percentiles(DURATION),
        ),
        Panel(
            "HTTP, by endpoint", "95 of 100 answers had been sent by then.", "s",
            [Query(quantile(0.95, HTTP, "endpoint, le"), "{{endpoint}}")],
        ),
    ],
)  # fmt: skip

TOKENS = Row(
    "Tokens",
    [
        Panel(
            "Tokens per second", "Of prompts, computed and taken from the cache, and of answers.",
            "short",
            [
                Query(rate("quire_prompt_tokens_total"), "prompt, computed"),
                Query(rate("quire_prompt_tokens_cached_total"), "prompt, cached"),
                Query(rate("quire_generated_tokens_total"), "generated"),
            ],
        ),
        Panel(
            "Prefix hits", "Share of prompt tokens that came from the cache.", "percentunit",
            [Query(HIT_RATIO, "hits")], maximum=1,
        ),
        Panel(
            "Why more was not shared",
            "Requests whose prompt left what is cached, by reason; /memory explains each reason.",
            "reqps", [Query(rate("quire_prefix_misses_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Panel(
            "Tokens of a prompt", "How long prompts are.", "short",
            percentiles("quire_request_prompt_tokens"),
        ),
        Panel(
            "Tokens of an answer", "How long answers are.", "short",
            percentiles("quire_request_generated_tokens"),
        ),
    ],
)  # fmt: skip

ENGINE = Row(
    "Engine",
    [
        Panel(
            "Running and waiting",
            "Sequences that hold KV cache memory, and those that wait for it.",
            "short",
            [
                Query(value("quire_requests_running"), "running"),
                Query(value("quire_requests_waiting"), "waiting"),
            ],
            thresholds=[(64, CRITICAL)],
        ),
        Panel(
            "Batch", "Sequences of a step.", "short",
            [Query(mean(SEQUENCES), "mean"), Query(quantile(0.95, SEQUENCES), "p95")],
        ),
        Panel(
            "Step time", "The pieces of prompts are cut so that steps keep to their target.", "s",
            [Query(mean(STEP), "mean"), *percentiles(STEP)],
        ),
        Panel(
            "Steps", "Per second.", "ops", [Query(rate("quire_steps_total"), "steps")],
        ),
        Panel(
            "Prompt tokens of a step", "What a step may take of prompts, as measured times allow.",
            "short", [Query(value("quire_step_budget_tokens"), "budget")],
        ),
        Panel(
            "Preemptions and bad rows",
            "Sequences that gave up their memory to older ones and are computed again; rows whose "
            "logits were no numbers.",
            "short",
            [
                Query(increase("quire_preemptions_total"), "preemptions"),
                Query(increase("quire_failed_rows_total"), "not finite"),
            ],
            colors={"not finite": "red"},
        ),
        Panel(
            "Age of the step", "How long the running step has taken so far; 0 while idle.", "s",
            [Query(f"max (quire_engine_step_age_seconds{{{CHOSEN}}})", "age")],
            thresholds=[(30, CRITICAL)],
        ),
        Panel(
            "Alive and draining", "Whether engines run, and whether servers have been told to end.",
            "short",
            [
                Query(f"min (quire_engine_alive_ratio{{{CHOSEN}}})", "alive"),
                Query(f"max (quire_draining_ratio{{{CHOSEN}}})", "draining"),
            ],
            maximum=1,
        ),
        Panel(
            "Processor", "Processors' time that the process takes: 1 is one processor.", "short",
            [Query(rate("process_cpu_seconds_total"), "processors")],
        ),
    ],
)  # fmt: skip

BY_REPLICA = "host, replica"
ITS_NAME = "{{host}} {{replica}}"
REPLICA_HITS = ratio(
    "quire_replica_cached_prompt_tokens_total", "quire_replica_prompt_tokens_total", BY_REPLICA
)

# Empty where no front has replicas.
CLUSTER = Row(
    "Cluster",
    [
        Panel(
            "Replicas", "How many there are, and how many of them say how they are.", "short",
            [
                Query(value("quire_replicas"), "there are"),
                Query(value("quire_replica_up_ratio"), "answer"),
            ],
        ),
        Panel(
            "Running by replica", "Sequences that each replica has admitted.", "short",
            [Query(value("quire_replica_requests_running", BY_REPLICA), ITS_NAME)], stacked=True,
        ),
        Panel(
            "Waiting by replica", "Sequences that wait for admission at each replica.", "short",
            [Query(value("quire_replica_requests_waiting", BY_REPLICA), ITS_NAME)], stacked=True,
        ),
        Panel(
            "Generated by replica", "Tokens of answers per second.", "short",
            [Query(rate("quire_replica_generated_tokens_total", BY_REPLICA), ITS_NAME)],
            stacked=True,
        ),
        Panel(
            "Prefix hits by replica", "Share of prompt tokens that the replica's cache had.",
            "percentunit", [Query(REPLICA_HITS, ITS_NAME)], maximum=1,
        ),
        Panel(
            "Given to another replica", "Prompts whose first replica was silent, gone or full.",
            "reqps", [Query(rate("quire_replica_retries_total"), "given to another one")],
            colors={"given to another one": "red"},
        ),
    ],
)  # fmt: skip

BOARD = Board(
    "quire-service",
    "quire: service",
    "Requests, latency, tokens, the engine's steps, and the replicas of a cluster.",
    [NOW, REQUESTS, LATENCY, TOKENS, ENGINE, CLUSTER],
)
