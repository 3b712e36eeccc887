"""Bodies made from the OpenAPI schema, and bodies that break it: ``python -m tests.clients.fuzz``.

No body gives a 500, every answer has a documented status and media type, and every error has the
shape of its API. The seed is fixed: one run is like another.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from server.config import Config
from server.http.app import create_app
from server.routes.openapi import ANTHROPIC_PATHS, OLLAMA_PATHS
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import make_service, start_engine, token_id

SEED = 20
HOST = "testserver"
"""What schemathesis calls an application in its own process."""
MENDINGS = 5
"""So often a body is sent again without the field that its error names."""
MAX_MODEL_LEN = 64
"""Answers that nobody bounds end here."""

Statuses = dict[str, Counter[int]]


def error_has_its_shape(_: Any, response: Response, case: Case[Any]) -> None:
    """OpenAI's, or Anthropic's and Ollama's on their paths."""
    if response.status_code >= 400:
        has_it = is_anthropic_error if case.path.startswith(ANTHROPIC_PATHS) else is_openai_error
        if case.path.startswith(OLLAMA_PATHS):
            has_it = is_ollama_error
        assert has_it(response.json()), response.text


def is_openai_error(body: Any) -> bool:
    """Exactly ``{"error": {message, type, param, code}}``."""
    match body:
        case {
            "error": {
                "message": str(message),
                "type": str(kind),
                "param": str() | None,
                "code": str() | None,
                **more,
            },
            **others,
        }:
            return bool(message and kind) and not more and not others
    return False


def is_anthropic_error(body: Any) -> bool:
    """Exactly ``{"type": "error", "error": {type, message}, "request_id"}``."""
    match body:
        case {
            "type": "error",
            "error": {"type": str(kind), "message": str(message), **more},
            "request_id": str(),
            **others,
        }:
            return bool(message and kind) and not more and not others
    return False


def is_ollama_error(body: Any) -> bool:
    """Exactly ``{"error": message}``."""
    match body:
        case {"error": str(message), **others}:
            return bool(message) and not others
    return False


CHECKS = [
    not_a_server_error,
    error_has_its_shape,
    status_code_conformance,
    content_type_conformance,
]


def fuzz(app: FastAPI, examples: int) -> Statuses:
    """So many bodies that satisfy the schema, and as many that do not, to each operation.

    Returns how often it answered with which status; raises at the first answer that must not be.
    """
    found: Statuses = {}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        statuses = found.setdefault(operation.label, Counter())
        modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:
            _fuzz(operation.as_strategy(generation_mode=mode), examples, statuses)
    return found


def _fuzz(cases: SearchStrategy[Case[Any]], examples: int, statuses: Counter[int]) -> None:
    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def answers(case: Case[Any]) -> None:
        for _ in range(MENDINGS):
            response = case.call()
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)
            field = _blamed_field(response)
            if not isinstance(case.body, dict) or field not in case.body:
                return
            case.body = {name: value for name, value in case.body.items() if name != field}

    answers()


def _blamed_field(response: Response) -> str | None:
    """The field of the body that a 400 names; without it the same body gets further."""
    if response.status_code != 400:
        return None
    error = response.json()["error"]
    said = error if isinstance(error, str) else error.get("param") or error["message"]
    # Anthropic's errors begin with it, and Ollama's.
    named = re.match(r"\w*", said)
    assert named is not None
    return named[0]


@contextmanager
def fuzzed_app(*, pools: bool = False) -> Iterator[FastAPI]:
    """The application around a small engine. pools: one that makes vectors and no text."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB)
        tokenizer = Tokenizer(Path(folder))
    engine = start_engine(max_model_len=MAX_MODEL_LEN, check_every_step=False, pools=pools)
    end = token_id(tokenizer, "<|im_end|>")
    try:
        config = Config.model_validate({"access": {"allowed_hosts": [HOST]}})
        ends = frozenset({end})
        yield create_app(make_service(engine.client, tokenizer, config, stop_token_ids=ends))
    finally:
        engine.stop()


def main() -> None:
    """Prints what was answered."""
    parser = argparse.ArgumentParser(description="Bodies from the OpenAPI schema.")
    parser.add_argument("--examples", type=int, default=40)
    examples = parser.parse_args().examples
    started = time.monotonic()
    count = 0
    # A model that makes vectors refuses most bodies: few are enough.
    for pools, times in ((False, examples), (True, examples // 4)):
        print("an embedding model" if pools else "a model that generates")
        with fuzzed_app(pools=pools) as app:
            found = fuzz(app, times)
        for label, statuses in found.items():
            counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            print(f"  {label:42} {counts}")
        count += sum(map(Counter.total, found.values()))
    print(f"{count} answers in {time.monotonic() - started:.0f} s, none of them a 500")


if __name__ == "__main__":
    main()
