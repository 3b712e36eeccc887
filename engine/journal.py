"""Remembers across restarts how the engine has died on a GPU, so that the next start is gentler.

A death is an error that ended the engine, or a step that hung. The prompts that ran at a death are
kept as digests of their tokens under a secret key, never as tokens. A process that the system kills
leaves no death; but since version 0.32, MLX raises an error where the GPU fails."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import blake2b, sha256
from typing import Literal

import numpy as np

from engine.config import EngineConfig
from kvcache.backends.backend import BackendFailedError
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import DEATHS, FaultMemory, GPUFailure, read_record, write_record
from kvcache.selftest.machine import this_machine
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

# Each death in a slow step divides the target for a step's time, each death for lack of memory
# divides the most tokens of a step.
SLOW_DIVISOR, MEMORY_DIVISOR = 4, 2
# A prompt that ran at this many deaths runs alone. If it ran alone at one of them, it is refused.
DEATHS_SUSPECTED = 2
# Deaths are forgotten after this time of completed steps.
HEALTHY_S = 3600.0
MAX_DEATHS = 16
Trust = Literal["beside others", "alone", "refused"]
Death = tuple[str, list[str]]
"""The name of a GPUFailure or "", and the digests of the prompts that ran."""


class Journal:
    """The deaths of one model's engine on this machine, with this system and this MLX, and the
    faults of its KV backend. Without a GPU, nothing is remembered."""

    def __init__(
        self, kv_backend: KVBackend = KVBackend.POSIX, model: bytes = b"", key: bytes = b""
    ) -> None:
        """``model`` is the model's digest. ``key`` makes digests of prompts; without a key, prompts
        are not remembered."""
        self._kv_backend = kv_backend
        self._key = key
        self._worked_s = 0.0
        self._deaths: list[Death] = []
        if kv_backend.on_gpu:
            about = json.dumps([this_machine().as_json(), model.hex()])
            self._name = f"{DEATHS}{sha256(about.encode()).hexdigest()[:16]}.json"
            self._deaths = _read_deaths(self._name)

    def session(self) -> AbstractContextManager[None]:
        """Return a context in which the engine has memory. If the machine goes down in this
        context, the KV backend is suspected, unless the backend maps nothing."""
        maps = self._kv_backend.on_gpu and not self._kv_backend.is_dense
        return FaultMemory(self._kv_backend).session() if maps else nullcontext()

    def gentler(self, config: EngineConfig) -> tuple[EngineConfig, str]:
        """Return the settings for an engine that has died, and a sentence about them, or ""."""
        if not self._deaths:
            return config, ""
        known = GPUFailure.__members__
        kinds = [known[failure] for failure, _ in self._deaths if failure in known]
        slow = kinds.count(GPUFailure.INTERACTIVITY) + kinds.count(GPUFailure.TIMEOUT)
        short = kinds.count(GPUFailure.OUT_OF_MEMORY)
        target_ms = config.step_time_target_ms / SLOW_DIVISOR**slow
        maximum = max(1, config.max_num_batched_tokens // MEMORY_DIVISOR**short)
        cause = kinds[-1].cause if kinds else "no failure of the GPU"
        return replace(config, step_time_target_ms=target_ms, max_num_batched_tokens=maximum), (
            f"this model's engine has failed here before ({cause}): steps are cut to {target_ms:g} "
            f"ms and {maximum} tokens, and prompts that ran at {DEATHS_SUSPECTED} failures run "
            f"alone, until it has worked for {HEALTHY_S / 60:.0f} minutes or `quire doctor` has run"
        )

    def trust(self, prompt_ids: Sequence[int]) -> Trust:
        digest = self.digest(prompt_ids) if self._deaths else ""
        met = [prompts for _, prompts in self._deaths if digest in prompts]
        if len(met) < DEATHS_SUSPECTED:
            return "beside others"
        return "refused" if [digest] in met else "alone"

    def digest(self, prompt_ids: Sequence[int]) -> str:
        tokens = np.array(prompt_ids, np.int64).tobytes()
        return blake2b(tokens, key=self._key, digest_size=16).hexdigest()

    def record(self, error: Exception, prompts: Sequence[Sequence[int]] = ()) -> None:
        """Remember a death by ``error``, and the prompts that ran. Any thread may call this. The
        newest death of a process replaces others: a hang may end with an error."""
        if not self._kv_backend.on_gpu:
            return
        if isinstance(error, BackendFailedError):
            FaultMemory(self._kv_backend).record(str(error))
        failure = GPUFailure.of(str(error))
        digests = list(dict.fromkeys(map(self.digest, prompts))) if self._key else []
        if failure or digests:
            death = ("" if failure is None else failure.name, digests)
            self._write([*self._deaths, death][-MAX_DEATHS:])

    def worked(self, seconds: float) -> None:
        """Add the time of a completed step; forget all deaths after HEALTHY_S."""
        self._worked_s += seconds
        if self._deaths and self._worked_s >= HEALTHY_S:
            self._deaths = []
            self._write([])

    def _write(self, deaths: list[Death]) -> None:
        try:
            os.close(write_record(self._name, {"deaths": deaths})[1])
        except OSError as error:
            log.warning("the engine's failures cannot be written down: %s", error)


def _read_deaths(name: str) -> list[Death]:
    record = read_record(cache_folder() / name)
    try:
        return [(str(failure), list(prompts)) for failure, prompts in record["deaths"]]
    except (KeyError, TypeError, ValueError):
        return []
