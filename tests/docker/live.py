"""A quire under load, a Prometheus that scrapes it, and every expression evaluated."""

import asyncio
import http.client
import math
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx2

from tests.clients.servers import QUIRE, serving
from tests.docker.boards import ROOT, Rule, Target, alerts, recordings, targets
from tests.docker.prometheus import (
    PROMTOOL,
    QUERY_TIMEOUT_S,
    SCRAPE_S,
    Prometheus,
    QueryError,
    Series,
    finite,
    scraping,
)

BURST = 24
BURST_EVERY_S = 4.0
# Enough for a request to wait longer than the interval of scrapes.
BURST_TOKENS = 320
REQUEST_TIMEOUT_S = 120.0
SEED = 6
SYSTEM = "You answer questions about quire, an inference server. " * 12
QUESTIONS = ("What is quire?", "What is a sparse buffer?", "What is a block?", "How do I start?")
FAULTS: list[tuple[str, str, bytes]] = [
    ("POST", "/v1/chat/completions", b"{"),
    ("POST", "/v1/chat/completions", b'{"messages": []}'),
    ("POST", "/v1/chat/completions", b'{"model": "other", "messages": []}'),
    ("GET", "/nowhere", b""),
    ("DELETE", "/v1/models", b""),
]


class Load:
    """Load of every kind that a board shows: streams with common beginnings, errors, refusals,
    clients that leave, answers beyond the first, bursts that fill the queue and the memory."""

    def __init__(self, address: str, key: str, seconds: float) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        # A connection that idles as long as the server lets it may be closed under a new request.
        self._client = httpx2.AsyncClient(
            base_url=address, headers=self._headers, timeout=REQUEST_TIMEOUT_S, trust_env=False,
            limits=httpx2.Limits(keepalive_expiry=BURST_EVERY_S / 2),
        )  # fmt: skip
        self._end_s = time.monotonic() + seconds
        self._random = random.Random(SEED)
        self.answers: Counter[str] = Counter()
        """Counts by status, or by the end of the client."""

    async def run(self) -> None:
        async with self._client:
            chats = [self._again(self._chat) for _ in range(3)]
            others = (self._fault, self._leave, self._several, self._alien)
            await asyncio.gather(*chats, *(self._again(one, 0.5) for one in others), self._bursts())

    async def _again(self, one: Callable[[], Awaitable[None]], pause_s: float = 0.05) -> None:
        while time.monotonic() < self._end_s:
            await one()
            await asyncio.sleep(pause_s)

    async def _bursts(self) -> None:
        while time.monotonic() < self._end_s:
            await asyncio.gather(*(self._chat(BURST_TOKENS) for _ in range(BURST)))
            await asyncio.sleep(BURST_EVERY_S)

    async def _chat(self, tokens: int = 24) -> None:
        body = self._body(tokens)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            self._count(answer)
            async for _ in answer.aiter_bytes():
                pass

    async def _leave(self) -> None:
        """Open a stream, and leave after its first bytes."""
        body = self._body(400)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                self.answers["left"] += 1
                return

    async def _several(self) -> None:
        """Get two answers, when the queue has room: the second one copies a partial block."""
        body = self._body(16) | {"n": 2, "stream": False}
        status = 429
        while status == 429:
            answer = await self._client.post("/v1/chat/completions", json=body)
            self._count(answer)
            status = answer.status_code
            await asyncio.sleep(0.05)

    async def _fault(self) -> None:
        method, path, body = self._random.choice(FAULTS)
        headers = {"Content-Type": "application/json"}
        self._count(await self._client.request(method, path, content=body, headers=headers))

    async def _alien(self) -> None:
        """Send a wrong key, a wrong host name, and the origin of another page."""
        for headers in (
            {"Authorization": "Bearer the-key-of-nobody-here"},
            {"Host": "elsewhere.example"},
            {"Origin": "https://elsewhere.example"},
        ):
            with suppress(httpx2.TransportError):
                self._count(await self._client.get("/v1/models", headers=headers))

    def _body(self, tokens: int) -> dict[str, object]:
        """Return a long common beginning, one of a few questions, and sometimes a number that is
        new."""
        question = self._random.choice(QUESTIONS)
        system = SYSTEM
        if self._random.random() < 0.3:
            question = f"{self._random.randrange(10**9)} {question}"
        if self._random.random() < 0.2:
            system = f"{self._random.randrange(10**9)} {system}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        limit = {"max_tokens": tokens, "min_tokens": tokens // 2}
        return {"messages": messages, "stream": True} | limit

    def _count(self, answer: httpx2.Response) -> None:
        self.answers[str(answer.status_code)] += 1


LOAD_S = 25.0
SCRAPED_WITHIN_S = 30.0
KEY = "the-key-of-its-clients"
SCRAPE_KEY = "the-key-of-its-prometheus"
SETTINGS = {
    "access.api_keys": KEY,
    "access.scrape_key": SCRAPE_KEY,
    "limits.max_queued_requests": "6",
    "metrics.vllm_names": "false",
}
# Queries whose numbers need not rise above zero here, by panel and legend, and why.
ALWAYS_ZERO = {
    ("Errors", "5xx"): "nothing breaks",
    ("Errors", "broken off"): "nothing breaks",
    ("Heaps", "kept"): "only a GPU keeps heaps",
    ("Machine", "swap used"): "this machine may have none",
    ("Pressure", "level"): "this machine has memory",
    ("Preemptions and bad rows", "not finite"): "the model is sound",
    ("Alive and draining", "draining"): "nobody ends it",
    ("Why a replica was chosen", "given to another one"): "no replica is lost",
}
# Series of a front with replicas, which ``tests/docker/cluster.py`` shows, and of several models,
# which ``check_several`` shows. Elsewhere they are evaluated.
OF_A_CLUSTER, OF_MODELS = "quire_replica", re.compile("quire_models?_|model!=")
ELSEWHERE = re.compile(f"{OF_A_CLUSTER}|{OF_MODELS.pattern}")
# Scrapes of a server before its first request.
IDLE_S = 4.0
# More than one copy of the demo model needs, less than two need.
BUDGET_OF_ONE = "800MiB"


def check_live() -> tuple[int, int]:
    """Return how many expressions passed, and how many failed."""
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    limits = ["--kv-budget", "3MiB", "--heap-size", "1MiB", "--max-num-seqs", "12"]
    model = str(ROOT / "configs" / "demo" / "model")
    command = (QUIRE, "serve", model, "--port", "0", *limits, *settings)
    with serving(*command) as server, scraping(server.url[7:], SCRAPE_KEY) as prometheus:
        start_s = time.time()
        time.sleep(IDLE_S)
        load = Load(server.url, KEY, LOAD_S)
        asyncio.run(load.run())
        print(f"answers: {dict(sorted(load.answers.items()))}")
        outcome = [_metrics_are_sound(server.url), _is_scraped(prometheus)]
        queries = [its for its in targets() if not ELSEWHERE.search(its.expr)]
        rules = [its for its in recordings() if OF_A_CLUSTER not in its.expr]
        outcome += [shows(prometheus, target, start_s) for target in queries]
        outcome += [_records(prometheus, rule, start_s) for rule in rules]
        others = [its.executable for its in targets() if ELSEWHERE.search(its.expr)]
        others += [its.expr for its in recordings() if OF_A_CLUSTER in its.expr]
        outcome += [_is_taken(prometheus, expr) for expr in others]
        outcome += [_is_evaluated(prometheus, rule) for rule in alerts()]
    return sum(outcome), len(outcome) - sum(outcome)


def check_several() -> tuple[int, int]:
    """Return how many expressions of several models passed, and how many failed: two models take
    turns in the memory of one."""
    limits = ["--kv-budget", "3MiB", "--heap-size", "1MiB"]
    settings = [f"access.scrape_key={SCRAPE_KEY}", f"models.memory_budget={BUDGET_OF_ONE}"]
    settings += ["models.evict_after_idle_s=1"]
    more = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as name:
        models = [Path(name) / each for each in ("one", "other")]
        for model in models:
            shutil.copytree(ROOT / "configs" / "demo" / "model", model)
        command = (QUIRE, "serve", *map(str, models), "--port", "0", *limits, *more)
        with serving(*command) as server, scraping(server.url[7:], SCRAPE_KEY) as prometheus:
            start_s = time.time()
            # A counter has a rate only if it was scraped before it rose.
            counter = 'quire_generated_tokens_total{model="one"}'
            outcome = [_answers(server.url, "one"), _is_seen(prometheus, counter)]
            outcome += [
                _answers(server.url, "one"),
                _is_seen(prometheus, f"rate({counter}[15s]) > 0"),
            ]
            outcome += [_answers(server.url, each) for each in ("other", "one")]
            time.sleep(2 * SCRAPE_S)
            queries = [its for its in targets() if OF_MODELS.search(its.expr)]
            outcome += [shows(prometheus, target, start_s) for target in queries]
    return sum(outcome), len(outcome) - sum(outcome)


def _answers(address: str, model: str) -> bool:
    """Ask a model until it has the memory for an answer, and return whether it has answered."""
    messages = [{"role": "user", "content": "What is quire?"}]
    body = {"model": model, "messages": messages, "max_tokens": 200, "min_tokens": 200}
    deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
    status = 0
    while status != 200 and time.monotonic() < deadline_s:
        answer = httpx2.post(
            f"{address}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        status = answer.status_code
        time.sleep(SCRAPE_S)
    return _told(status == 200, f"{model} answers", f"{status}")


def _metrics_are_sound(address: str) -> bool:
    """Let promtool read what the scraper gets."""
    connection = http.client.HTTPConnection(address[7:], timeout=QUERY_TIMEOUT_S)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {SCRAPE_KEY}"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True)
    print(f"promtool check metrics: {len(text.splitlines())} lines, exit code {done.returncode}")
    print((done.stdout + done.stderr).decode(), end="")
    return answer.status == 200 and done.returncode == 0


def _is_scraped(prometheus: Prometheus) -> bool:
    """Return whether both jobs scrape with the scrape key. A busy machine may miss a scrape, but
    not the next one."""
    wanted = {"quire-native": "up", "prometheus": "up"}
    deadline_s = time.monotonic() + SCRAPED_WITHIN_S
    while (found := prometheus.targets()) != wanted and time.monotonic() < deadline_s:
        time.sleep(SCRAPE_S)
    print(f"scraped: {found}")
    return found == wanted


def shows(prometheus: Prometheus, target: Target, start_s: float) -> bool:
    """Return whether a query of a panel shows a series with numbers over the time of the load, one
    of them above zero where that can be."""
    name = f"{target.board:8} {target.panel:32.32} {target.legend:18.18}"
    try:
        prometheus.query(target.executable)
        found = prometheus.query_range(target.executable, start_s, time.time())
    except QueryError as error:
        return _told(False, name, str(error))
    series = finite(found)
    if odd := {value for one in found for _, value in one["values"] if not _is_number(value)}:
        return _told(False, name, f"shows {odd}")
    reason = ALWAYS_ZERO.get((target.panel, target.legend), "")
    peak = _peak(series)
    shown = bool(series) and (peak > 0 or bool(reason))
    told = f"{len(series)} series, up to {peak:.4g}"
    return _told(shown, name, f"{told}: {reason}" if reason else told)


def _is_seen(prometheus: Prometheus, expr: str) -> bool:
    """Wait until an expression has a series, and return whether it has one in time."""
    deadline_s = time.monotonic() + SCRAPED_WITHIN_S
    while not (found := prometheus.query(expr)) and time.monotonic() < deadline_s:
        time.sleep(SCRAPE_S)
    return _told(bool(found), expr, f"{len(found)} series")


def _records(prometheus: Prometheus, rule: Rule, start_s: float) -> bool:
    """Return whether a rule has recorded something, with the labels that it gives."""
    labels = "".join(
        f',{name}="{value}"' for name, value in rule.settings.get("labels", {}).items()
    )
    try:
        prometheus.query(rule.expr)
        recorded = f'{rule.name}{{job="quire-native"{labels}}}'
        series = finite(prometheus.query_range(recorded, start_s, time.time()))
    except QueryError as error:
        return _told(False, rule.name, str(error))
    return _told(bool(series), f"{'record':8} {rule.name + labels:51.51}", f"{len(series)} series")


def _is_taken(prometheus: Prometheus, expr: str) -> bool:
    """Return whether Prometheus takes an expression; it finds nothing here."""
    try:
        prometheus.query(expr)
    except QueryError as error:
        return _told(False, expr, str(error))
    return _told(True, f"{'cluster':8} {expr:51.51}", "evaluated")


def _is_evaluated(prometheus: Prometheus, rule: Rule) -> bool:
    """Return whether Prometheus takes an alert's expression; its result depends on this machine."""
    try:
        series = prometheus.query(rule.expr)
    except QueryError as error:
        return _told(False, rule.name, str(error))
    return _told(True, f"{'alert':8} {rule.name:51}", f"{len(series)} would wait")


def _peak(series: Series) -> float:
    """Return the greatest number of all series at any time."""
    numbers = [float(value) for one in series for _, value in one["values"] if _is_number(value)]
    return max(numbers, default=0.0)


def _is_number(value: str) -> bool:
    return math.isfinite(float(value))


def _told(good: bool, name: str, what: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {name} {what}")
    return good
