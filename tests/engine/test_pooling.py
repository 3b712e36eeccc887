"""Vectors equal those of mlx-lm's own layers, alone and in each other's company."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from engine.client import EngineClient
from engine.models.checkpoint import read_checkpoint
from engine.models.weights import load_model
from engine.step.plan import NOT_FINITE, Vector
from engine.step.sampler import pool
from engine.types import FinishReason, PrefixSalt, PromptTooLongError, SamplingParams
from kvcache.layout import KVFormat
from tests.engine.models.forwards import cache_for, step
from tests.engines import CONFIG, built_loop, started, submit
from tests.kvcache.managers import join
from tests.models import ModelSpec, write_embedding_model, write_model
from tests.reference import load_reference

SPEC = ModelSpec(tie_word_embeddings=False)
LENGTHS = (1, 2, 7, 63, 64, 65, 200, 399, 400)
MAX_MODEL_LEN = 400
ENGINE = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=1 << 20,
    kv_budget_bytes=None,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=16,
    step_time_target_ms=1e6,
    prefix_keep_s=1000.0,
)
NO_TOKENS = SamplingParams(0)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("embedding"), SPEC, seed=3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokens = np.random.default_rng(4).integers(0, SPEC.vocab_size, max(LENGTHS)).tolist()
    return [tokens[:length] for length in LENGTHS]


def vectors_of(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """mlx-lm's layers and final norm over one prompt at a time; the last state, at length 1."""
    last = [np.array(model.model(mx.array([ids]))[0, -1].astype(mx.float32)) for ids in prompts]
    return np.stack([state / np.linalg.norm(state) for state in last])


def pooling_client(folder: Path, **changes: Any) -> EngineClient:
    client = started(lambda emit: built_loop(folder, replace(ENGINE, **changes), emit))
    client.attach()
    return client


async def vector(client: EngineClient, ids: list[int], salt: bytes = b"") -> np.ndarray:
    return (await vector_and_cached(client, ids, salt))[0]


async def vector_and_cached(
    client: EngineClient, ids: list[int], salt: bytes = b""
) -> tuple[np.ndarray, int]:
    """The vector, and how many tokens came from the cache."""
    stream = submit(client, tuple(ids), NO_TOKENS, pooling=True, salt=PrefixSalt(client=salt))
    (event,) = await stream.next_batch(60.0)
    assert await stream.next_batch(60.0) == [], "that was the end"
    assert (event.token_id, event.finish, event.message) == (None, FinishReason.STOP, None)
    assert event.prefix is not None
    assert event.embedding is not None
    assert event.embedding.dtype == np.float32
    return event.embedding, event.prefix.cached_tokens


@pytest.mark.parametrize("chunk", [1, 64])
async def test_vectors_equal_mlx_lms_in_company_and_alone(
    folder: Path, prompts: list[list[int]], chunk: int
) -> None:
    model = load_reference(read_checkpoint(folder))
    want = vectors_of(model, prompts)
    client = pooling_client(folder, max_num_batched_tokens=chunk)
    try:
        assert client.limits.embedding_size == SPEC.hidden_size
        together = np.stack(await asyncio.gather(*(vector(client, ids) for ids in prompts)))
        assert np.abs(together - want).max() < TOLERANCE
        assert (together * want).sum(axis=1) == pytest.approx(np.ones(len(LENGTHS)), abs=1e-6)
        # Nobody shares with these, and they are alone.
        alone = np.stack([await vector(client, ids, b"alone") for ids in prompts])
        assert np.abs(together - alone).max() < TOLERANCE
        found = [await vector_and_cached(client, ids) for ids in prompts]
        assert np.abs(np.stack([again for again, _ in found]) - want).max() < TOLERANCE
        # Statistics of a busy engine are a little old; what a request reports is not.
        assert sum(cached for _, cached in found) > 500
        assert client.stats.generated_tokens == 0
    finally:
        assert client.stop(10.0)


async def test_a_text_may_fill_the_whole_context_and_no_more(folder: Path) -> None:
    client = pooling_client(folder)
    try:
        assert len(await vector(client, [5] * MAX_MODEL_LEN)) == SPEC.hidden_size
        with pytest.raises(PromptTooLongError):
            submit(client, (5,) * (MAX_MODEL_LEN + 1), NO_TOKENS, pooling=True)
    finally:
        assert client.stop(10.0)


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("bare", [True, False])
def test_weights_load_by_either_name(tmp_path: Path, how: dict[str, Any], bare: bool) -> None:
    named = write_model(tmp_path / "named", SPEC, seed=3, **how)
    folder = write_embedding_model(tmp_path / "bare", SPEC, seed=3, bare=bare, **how)
    want, found = (
        list(load_model(read_checkpoint(path), lambda *_: None, None).weights)
        for path in (named, folder)
    )
    parts = 3 if "bits" in how else 1
    head = [its.shape == want[0].shape for its in want].index(True, parts)
    for part in want[head : head + parts]:
        assert part.shape[0] == SPEC.vocab_size
    del want[head : head + parts]
    assert all(mx.array_equal(*pair) for pair in zip(want, found, strict=True))


def test_bare_names_can_generate_where_a_setting_says_so(tmp_path: Path) -> None:
    found = read_checkpoint(write_embedding_model(tmp_path), embeds=False)
    model, kv = (
        load_model(found, lambda *_: None, metal_ext.CpuWorkers(1)),
        cache_for(found, KVFormat.FLOAT32),
    )
    assert join(kv, 1, 2)
    assert step(model, kv, [(1, 0, [1, 2])], [0, 1]).shape == (2, 1024)


def test_a_state_that_is_not_finite_or_has_no_length_gives_no_vector() -> None:
    states = mx.array([[3.0, 4.0], [float("nan"), 1.0], [0.0, 0.0], [float("inf"), 1.0]])
    first, *others = pool(states.astype(mx.bfloat16)).read()
    assert isinstance(first, Vector)
    assert first.values.tolist() == pytest.approx([0.6, 0.8])
    assert others == [NOT_FINITE] * 3
