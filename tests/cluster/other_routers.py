"""Ray's own prefix router, which knows text alone, told of our prompts."""

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)

from engine.types import Submission


class CharacterRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Sees a character for each token of a prompt."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        for argument in pending_request.args:
            if isinstance(argument, Submission):
                return "".join(chr(0x4E00 + token) for token in argument.prompt_ids)
        return "?"
