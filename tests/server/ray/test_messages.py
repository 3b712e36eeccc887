"""Forms of answers that are enforced elsewhere."""

import pytest

from server.ray.messages import SendingCompiler, SentForm
from server.text.conversation import OutputFormat
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.vocabulary import Vocabulary
from server.text.grammar.worker import GrammarLimits, GrammarWorker
from server.text.tokenizer import Tokenizer


async def test_a_form_is_checked_and_sent_as_it_was_asked_for(tokenizer: Tokenizer) -> None:
    limits = GrammarLimits(5.0)
    compiler = SendingCompiler(
        Vocabulary(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.end_ids)),
        lambda made: GrammarWorker(made.text, made.facts, limits),
        limits,
    )
    try:
        spec = ConstraintSpec(OutputFormat("regex", "[0-9]+", "guided_regex"))
        sent: object = await compiler.compile(spec, "1")
        assert sent == SentForm(spec, "1")
        assert await compiler.compile(ConstraintSpec()) is None
        with pytest.raises(GrammarError):
            await compiler.compile(ConstraintSpec(OutputFormat("regex", "(", "guided_regex")))
    finally:
        await compiler.close()
