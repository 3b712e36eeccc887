"""Whatever schema is supported: what anything goes for makes of it satisfies it."""

import json
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator

from server.text.conversation import OutputFormat
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.text.grammars import compiler, text_of, wander
from tests.structured.random_schemas import RandomSchemas

SCHEMAS = 200
MOST_TOKENS = 2000


@pytest.mark.parametrize("seed", range(3))
async def test_answers_at_random_satisfy_schemas_at_random(tmp_path: Path, seed: int) -> None:
    write_tokenizer(tmp_path, VOCAB)
    tokenizer = Tokenizer(tmp_path)
    made, schemas, rng = compiler(tokenizer), RandomSchemas(seed), Random(seed)
    judged = 0
    for _ in range(SCHEMAS):
        schema = schemas.draw()
        try:
            constraint = await made.compile(ConstraintSpec(OutputFormat("json_schema", schema)))
        except GrammarError:
            continue
        assert constraint is not None
        tokens = wander(constraint, tokenizer, rng, MOST_TOKENS)
        if tokens is not None:
            value = json.loads(text_of(tokenizer, tokens))
            found = [error.message for error in Draft202012Validator(schema).iter_errors(value)]
            assert not found, (schema, value)
            judged += 1
    assert judged > SCHEMAS / 2
