"""``quire bench``: measures a model with the engine that serves, and prints a line to share."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from engine.client import EngineClient, TokenStream
from engine.machine import machine_memory
from engine.types import FinishReason, Request, SamplingParams
from kvcache.budget import gib
from kvcache.selftest.machine import process_footprint, this_machine
from server.cli.log import configure_log
from server.cli.model_files import ModelError, read_model
from server.cli.serve import STOP_TIMEOUT_S, EngineError, start_engine
from server.cli.settings import read_settings

# How long answers are measured for each number of streams.
MEASURE_S = 8.0
STREAMS = (1, 4, 8)
# Prompts' lengths in tokens. After a prompt that took over SHORT_PROMPT_S, no longer one follows.
PROMPTS = (32, 128, 512, 2048)
SHORT_PROMPT_S = 2.0
# Prompt tokens before each measured answer.
BEFORE_ANSWERS = 16
EVENT_TIMEOUT_S = 120.0
LINE = (
    "{chip}, {memory}: {model}: prompt {prompt_tokens_per_s:.0f} tokens/s ({prompt_tokens} "
    "tokens), decode {rates} tokens/s at {streams} streams, peak memory {peak}; quire {quire}"
)


def bench_model(name: str, file: Path | None, *, as_json: bool) -> str:
    """Measure a model, and return a line or a JSON object. Raises StartError."""
    settings = read_settings(file, {"log": {"level": "warning"}})
    configure_log(settings.log)
    model = read_model(name, settings)
    if model.plan.checkpoint.embeds:
        raise ModelError(f"{name}: it makes vectors, and answers are what is measured")
    threads = "" if model.plan.on_gpu else f", {model.plan.threads} threads"
    chip = this_machine().processor + threads
    client = start_engine(settings, model.plan)
    try:
        figures = asyncio.run(_measure(client))
        peak_bytes = max(_peak_bytes(), process_footprint())
    finally:
        client.stop(STOP_TIMEOUT_S)
    figures |= {
        "chip": chip,
        "memory_bytes": machine_memory().total_bytes,
        "model": model.served.id,
        "peak_memory_bytes": peak_bytes,
        "planned": model.plan.memory.figures(),
        "kv_backend": model.plan.kv_backend.kv_backend.setting,
        "quire": version("quire"),
    }
    rates = figures["decode_tokens_per_s"]
    line = LINE.format(
        **figures,
        memory=gib(figures["memory_bytes"]),
        peak=gib(peak_bytes),
        rates=" / ".join(f"{rate:.1f}" for rate in rates.values()),
        streams=" / ".join(map(str, rates)),
    )
    return json.dumps(figures | {"line": line}) if as_json else line


async def _measure(client: EngineClient) -> dict[str, Any]:
    """Return the speeds of a prompt and of parallel answers. Raises EngineError on a failure."""
    client.attach()
    limits, random = client.limits, Random(0)  # noqa: S311 - tokens of prompts are no secrets
    figures: dict[str, Any] = {"decode_tokens_per_s": {}, "command_buffers_per_step": {}}

    def submit(tokens: int, answer: int, first: Sequence[TokenStream] = ()) -> TokenStream:
        prompt = tuple(random.randrange(limits.vocab_size) for _ in range(tokens))
        request = Request(prompt, (SamplingParams(answer, temperature=0.0),))
        return client.submit(request, *first[:1])[0]

    for tokens in (tokens for tokens in PROMPTS if tokens < limits.max_model_len):
        began = time.perf_counter()
        await _wait_for_first_tokens([submit(tokens, 1)])
        took_s = time.perf_counter() - began
        figures |= {"prompt_tokens": tokens, "prompt_tokens_per_s": tokens / took_s}
        if took_s > SHORT_PROMPT_S:
            break
    for count in (count for count in STREAMS if count <= limits.max_num_seqs):
        streams: list[TokenStream] = []
        for _ in range(count):
            streams.append(submit(BEFORE_ANSWERS, limits.max_model_len - BEFORE_ANSWERS, streams))
        await _wait_for_first_tokens(streams)
        before = client.stats
        figures["decode_tokens_per_s"][count] = await _tokens_per_s(streams)
        after = client.stats
        buffers = after.command_buffers - before.command_buffers
        figures["command_buffers_per_step"][count] = buffers / max(1, after.steps - before.steps)
    stats = client.stats
    drafting = stats.drafting.name.lower()
    return figures | {"mlx_peak_bytes": stats.mlx.peak_bytes, "drafting": drafting}


async def _wait_for_first_tokens(streams: Sequence[TokenStream]) -> None:
    waiting = set(streams)
    while waiting:
        counts, _ = await _counts(streams)
        waiting -= {stream for stream, count in zip(streams, counts, strict=True) if count}


async def _tokens_per_s(streams: Sequence[TokenStream]) -> float:
    """Return the speed of all streams together. Measure for MEASURE_S, or until a stream has
    reached the context's end; then end the streams."""
    tokens, took_s, ended = 0, 0.0, False
    began = time.perf_counter()
    while took_s < MEASURE_S and not ended:
        counts, ended = await _counts(streams)
        took_s = time.perf_counter() - began
        tokens += sum(counts)
    for stream in streams:
        stream.close()
    return tokens / took_s


async def _counts(streams: Sequence[TokenStream]) -> tuple[list[int], bool]:
    """Wait for tokens; return how many each stream got, and whether a stream has ended. Raises
    EngineError."""
    batches = await TokenStream.next_batches(streams, EVENT_TIMEOUT_S)
    finishes = {event.finish for batch in batches for event in batch}
    if not finishes or FinishReason.ERROR in finishes:
        raise EngineError("the engine has failed, or hangs: see the log")
    return [len(batch) for batch in batches], finishes != {None}


def _peak_bytes() -> int:
    """Return the peak of this process's resident memory, without memory that only a GPU uses."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
