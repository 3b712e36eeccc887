"""A conversation of twenty turns on whole servers, sent as a whole each time, as agents do.

Each server's own answers go back to it. *New* are the tokens of a prompt behind the prompt and the
answer before it. What a server computes of a prompt is what its usage does not call cached.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

from tests.bench.contest import Contest
from tests.bench.load import Target, make_prompt
from tests.bench.models import ModelStore
from tests.bench.peers import BrokenError, Contestant, Server
from tests.bench.programs import mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.sharing import read_metrics
from tests.bench.table import Goal, Row

TURNS = 20
SYSTEM_TOKENS, RESULT_TOKENS, ANSWER_TOKENS = 512, 96, 24
MAX_TURN_S = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the conversation, as usage counts it."""

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    seconds: float

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - self.cached_tokens


def run_twenty_turns(rounds: Rounds, contest: Contest, store: ModelStore) -> Part:
    """Servers take turns with whole conversations. mlx-lm's has the same weights in float32.

    Raises BrokenError when a server dies, refuses, or does not say what was cached.
    """
    mlx_lm = mlx_lm_server(store.float32(), 1) if contest.with_mlx_lm else None
    seen: dict[str, list[list[Turn]]] = defaultdict(list)
    told: dict[str, float] = {}
    with contest.servers(quire(store.bfloat16(), contest.threads), mlx_lm) as servers:
        for number in rounds:
            seed = next(contest.seeds)
            for server in servers[:: -1 if number % 2 else 1]:
                seen[server.label].append(converse(server, seed))
        ours, *peers = [server.label for server in servers]
        if isinstance(servers[0], Server):
            told = read_metrics(servers[0])
    rows = [row for peer in peers for row in _rows(seen[ours], peer, seen[peer])]
    facts = [(label, _text(seen[label][-1])) for label in (ours, *peers)]
    if told:
        block, copied = told["quire_kv_block_tokens"], told["quire_kv_copied_bytes_total"]
        most = max(max(beyond_new(turns)) for turns in seen[ours])
        goal = Goal(f"new + {block:.0f} a turn", most <= block)
        rows = [row.with_goal(goal) if row.unit == "tokens" else row for row in rows]
        facts.append(("K, V and states", f"{copied:.0f} bytes copied by quire"))
    return Part(rows, facts)


def converse(server: Contestant, seed: int) -> list[Turn]:
    """One conversation: the client adds a tool's result, as a person, to each answer."""
    messages = [{"role": "system", "content": make_prompt(seed, 0, SYSTEM_TOKENS)}]
    turns = []
    for number in range(1, TURNS + 1):
        messages.append({"role": "user", "content": make_prompt(seed, number, RESULT_TOKENS)})
        said, turn = ask(server.target, messages, MAX_TURN_S)
        messages.append({"role": "assistant", "content": said})
        turns.append(turn)
        server.check()
    return turns


def beyond_new(turns: Sequence[Turn]) -> list[int]:
    """What each turn after the first computed beside its new tokens."""
    known = [turn.prompt_tokens + turn.answer_tokens for turn in turns]
    new = [turn.prompt_tokens - had for turn, had in zip(turns[1:], known, strict=False)]
    return [turn.computed - its for turn, its in zip(turns[1:], new, strict=True)]


def ask(target: Target, messages: list[dict[str, str]], max_s: float) -> tuple[str, Turn]:
    """The answer's text, within some seconds. Raises BrokenError."""
    body = {"model": target.model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    connection = HTTPConnection(target.host, target.port, timeout=max_s)
    begun_s = time.perf_counter()
    try:
        path, head = f"{target.path}/chat/completions", {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body | {"temperature": 0}), head)
        answer = connection.getresponse().read()
        seconds = time.perf_counter() - begun_s
        found = json.loads(answer)
        usage = found["usage"]
        cached = int(usage["prompt_tokens_details"]["cached_tokens"])
        turn = Turn(usage["prompt_tokens"], cached, usage["completion_tokens"], seconds)
        return str(found["choices"][0]["message"]["content"]), turn
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise BrokenError(f"a turn at port {target.port} failed: {error!r}") from error
    finally:
        connection.close()


def _rows(ours: list[list[Turn]], peer: str, theirs: list[list[Turn]]) -> list[Row]:
    """One per server and figure."""

    def tokens(conversations: list[list[Turn]]) -> list[float]:
        return [float(sum(turn.computed for turn in turns)) for turns in conversations]

    def seconds(conversations: list[list[Turn]]) -> list[float]:
        return [sum(turn.seconds for turn in turns) for turns in conversations]

    name = f"{TURNS} turns of a conversation"
    return [
        Row.lower_is_better(f"{name}, computed", "tokens", tokens(ours), (peer, tokens(theirs))),
        Row.lower_is_better(f"{name}, all answers", "s", seconds(ours), (peer, seconds(theirs))),
    ]


def _text(turns: Sequence[Turn]) -> str:
    computed = " ".join(str(turn.computed) for turn in turns)
    beyond = beyond_new(turns)
    return (
        f"prompts of {turns[0].prompt_tokens} to {turns[-1].prompt_tokens} tokens, computed "
        f"{computed}; beyond what is new {sum(beyond)}, at most {max(beyond)}"
    )
