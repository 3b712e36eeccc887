from engine.token_counts import TokenCounts


def test_generated_tokens_are_counted_and_prompt_tokens_are_only_seen() -> None:
    counts = TokenCounts()
    counts.update([5, 6, 5, 7, 5, 7], num_prompt=3)
    assert counts.ids == [5, 6, 7]
    assert counts.generated == [1, 0, 2]


def test_only_what_is_new_is_counted() -> None:
    counts = TokenCounts()
    tokens = [1, 2]
    counts.update(tokens, num_prompt=2)
    for token in (1, 1, 9):
        tokens.append(token)
        counts.update(tokens, num_prompt=2)
        counts.update(tokens, num_prompt=2)
    assert dict(zip(counts.ids, counts.generated, strict=True)) == {1: 2, 2: 0, 9: 1}
