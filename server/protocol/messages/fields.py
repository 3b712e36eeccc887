"""What becomes of every field of /v1/messages: the rule, in one table."""

from server.protocol.fields import (
    ACCOUNT,
    SAMPLING_FIELDS,
    SPEED_ONLY,
    STRUCTURE_FIELDS,
    FieldRule,
    Rule,
    accepted,
    ignored,
    refused,
)

OTHER_NAMES = ("max_tokens", "stop", "n", "stream_options", "best_of")


def _here(field: FieldRule) -> FieldRule:
    """Adapt a rule of the other APIs: what is refused there is refused here; what to do instead may
    have no field here."""
    if field.rule is not Rule.REFUSED:
        return field
    note = "the table of /v1/chat/completions says what to do instead"
    return refused(field.name, note, *field.harmless)


MESSAGES_FIELDS = (
    accepted("max_tokens", "required; more than fit is cut"),
    accepted(
        "messages",
        "what Claude Code's have, tools that they load included; other blocks are left out; where "
        "the last one is the assistant's, it is continued",
    ),
    accepted("system", "text; billing headers of Claude Code are left out"),
    accepted("stop_sequences", "no part of one is sent"),
    accepted(
        "tools",
        "custom ones, deferred ones where messages load them; Anthropic's server tools are left "
        "out, its others refused",
    ),
    accepted("tool_choice", "auto, any, tool, none; disable_parallel_tool_use"),
    accepted(
        "thinking",
        "enabled, disabled, adaptive (as if it were not there), between_tools (as disabled)",
    ),
    accepted("output_config", "effort: low and medium have budgets; format: json_schema"),
    accepted("enable_thinking", "where thinking does not say it"),
    accepted("chat_template_kwargs", "what the model's template takes; another one is refused"),
    *(_here(field) for field in SAMPLING_FIELDS if field.name not in OTHER_NAMES),
    *(_here(field) for field in STRUCTURE_FIELDS),
    refused("stop", "use stop_sequences"),
    refused("n", "an answer is one message", 1),
    refused("best_of", "an answer is one message", 1),
    refused("max_completion_tokens", "use max_tokens"),
    refused("logprobs", "use /v1/chat/completions"),
    refused("top_logprobs", "use /v1/chat/completions"),
    refused("output_format", "use output_config"),
    refused("reasoning_effort", "use output_config"),
    refused("thinking_token_budget", "use thinking"),
    refused("thinking_budget", "use thinking"),
    refused("container", "this server runs no code"),
    refused("mcp_servers", "offer their tools as tools"),
    refused("thread", "nothing is stored here: send the whole conversation"),
    ignored("stream_options", "usage is always sent"),
    ignored("cache_control", "prefixes are found by their tokens, and kept while there is room"),
    ignored("context_management", "the prompt is what was sent; nothing is taken out of it"),
    ignored("compaction", "the prompt is what was sent; nothing is taken out of it"),
    ignored("metadata", ACCOUNT),
    ignored("service_tier", SPEED_ONLY),
    ignored("speed", SPEED_ONLY),
    ignored("inference_geo", "the answer is made where the server is"),
    ignored("diagnostics", "use cache_report"),
    ignored("fallbacks", "there is one model"),
    ignored("user_profile_id", ACCOUNT),
    ignored("workspace_id", ACCOUNT),
)
