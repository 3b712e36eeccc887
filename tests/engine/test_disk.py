"""Prefixes on disk, by whole engines one after the other."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Stop
from engine.step.token_budget import TokenBudget
from engine.types import PrefixReport, SamplingParams, TokenEvent
from kvcache.backends.backend import file_checksum
from kvcache.block_hashes import PrefixSalt
from kvcache.sequences import PromptBoundaries
from kvcache.stats import DiskStats
from kvcache.tier.store import ReadResult, RecordStore, TierLimits
from kvcache.user_folders import prefixes_folder
from tests.engines import CONFIG, built_loop, request_of, run_dry
from tests.families import GEMMA3, GPT_OSS, HYBRID, QWEN3_MOE
from tests.models import write_model

SALT = PrefixSalt(b"somebody", may_be_written=True)
PROMPT = tuple(number % 300 for number in range(203))
CACHE = replace(
    CONFIG, page_bytes=None, kv_budget_bytes=None, drafts=True, prefix_keep_s=1000.0, overlap=True
)


@pytest.fixture(autouse=True)
def slow_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny models seem to compute slowly, or else reading them would never pay."""
    monkeypatch.setattr(TokenBudget, "seconds", lambda _, start, end: float(end - start))


@dataclass(frozen=True)
class Life:
    """What one engine answered."""

    tokens: tuple[tuple[int, ...], ...]
    prefixes: tuple[PrefixReport, ...]
    disk: DiskStats

    @property
    def cached(self) -> tuple[int, ...]:
        return tuple(prefix.cached_tokens for prefix in self.prefixes)


def live(
    folder: Path,
    prompts: Iterable[tuple[int, ...]] = (PROMPT,),
    salt: PrefixSalt = SALT,
    *,
    system_end: int = 0,
    **changes: Any,
) -> Life:
    """Start an engine, let it answer prompts one after the other, and end it."""
    events: list[TokenEvent] = []
    loop = built_loop(folder, replace(CACHE, **changes), events.extend)
    for number, prompt in enumerate(prompts, 1):
        params = SamplingParams(12, temperature=0.0)
        boundaries = PromptBoundaries(system_end=system_end)
        loop.mailbox.put(request_of(number, prompt, params, salt=salt, boundaries=boundaries))
        run_dry(loop)
    loop.mailbox.put(Stop())
    loop.run()
    disk = loop.stats.disk
    loop.close()
    numbers = sorted({event.request_id for event in events})
    tokens = tuple(
        tuple(e.token_id for e in events if e.request_id == n and e.token_id is not None)
        for n in numbers
    )
    prefixes = {e.request_id: e.prefix for e in events if e.prefix is not None}
    return Life(tokens, tuple(prefixes[n] for n in numbers), disk)


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense with a head": {"head": "mtp"},
    "mixture": QWEN3_MOE,
    "windows": GEMMA3,
    "windows with sinks": GPT_OSS,
    "hybrid": HYBRID,
    "hybrid with a head": HYBRID | {"head": "mtp"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_outlives_its_engine(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", gain=3.0, **KINDS[kind])
    first = live(folder)
    assert first.cached == (0,)
    assert first.disk.written_bytes
    second = live(folder)
    assert second.tokens == first.tokens
    size = 16
    assert len(PROMPT) - second.cached[0] <= 4 * size
    assert second.disk.read_bytes
    assert not second.disk.written_bytes, "all was written before"
    with closing(RecordStore(prefixes_folder(None), TierLimits(1 << 30))) as store:
        results = store.verify(file_checksum)
    assert results.pop(ReadResult.OK)
    assert not any(results.values()), "all kinds of records have one kind of checksum"
