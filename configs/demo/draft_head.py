"""The demo model's MTP head, which drafts the tokens after the next one.

Row s of the head joins the model's hidden row s - 1, after its final norm, with token s, and its
output stands for token s + 1 (arXiv 2412.19437, 2.2). The output takes the place of the hidden row
for the next draft. All rows are computed at once: each pass over them is one draft deeper.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ConcatenateKVCache
from mlx_lm.models.qwen3 import Model, ModelArgs, TransformerBlock

DEPTH = 3


class Head(nn.Module):  # type: ignore[misc]
    """One layer of the model's own kind. The names are those of Qwen3.5's checkpoints."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden, eps)
        self.layers = [TransformerBlock(args)]
        self.norm = nn.RMSNorm(hidden, eps)

    def __call__(self, embedded: mx.array, hidden: mx.array) -> Iterator[mx.array]:
        """Yield each pass's outputs. Inputs and outputs are `[batch, length, hidden]`."""
        embedded = self.pre_fc_norm_embedding(embedded)
        length = hidden.shape[1]
        has_before = (mx.arange(length) > 0)[:, None]
        cache = ConcatenateKVCache()
        for number in range(DEPTH):
            before = self.pre_fc_norm_hidden(mx.roll(hidden, 1, 1))
            x = self.fc(mx.concatenate([embedded, before], axis=-1)) * has_before
            cache.offset = 0  # a pass has the positions of the pass before it
            hidden = self.norm(self.layers[0](x, visible(length, number), cache))
            yield hidden


def visible(length: int, number: int) -> mx.array:
    """Return which keys of all passes so far a pass's rows see, as bool `[length, keys]`.

    As in a server, they see keys of the first pass, whose hidden rows are the model's own, up to
    the first draft's, and then one key of each pass, for each draft before their own.
    """
    age = mx.arange(length)[:, None] - mx.arange(length)
    drafts = [age == number - later for later in range(1, number + 1)]
    return mx.concatenate([age >= number, *drafts], axis=1)


def head_loss(head: Head, trunk: Model, ids: mx.array, places: mx.array) -> mx.array:
    """Mean cross entropy to what the trunk expects after each of the places in the flat ids."""
    learnt, embed, hidden = np.array(places), trunk.model.embed_tokens, trunk.model(ids)
    # No draft stands for an answer's first token: the model's own step draws it.
    rows = mx.array(learnt[1:][np.diff(learnt) == 1])
    logits = [
        embed.as_linear(states.reshape(-1, states.shape[-1])[rows])
        for states in (hidden, *head(embed(ids), hidden))
    ]
    expected = mx.softmax(logits[0], axis=-1)
    losses = [nn.losses.cross_entropy(each, expected) for each in logits[1:]]
    return mx.mean(mx.stack(losses))
