"""A plugin of pytest: test modules, too, are translated on their way to the compiler."""

import ast
import sys
from typing import Any

from _pytest.assertion import rewrite

_rewrite_asserts = rewrite.rewrite_asserts


def _translate_first(module: ast.Module, *arguments: Any) -> None:
    sys.modules["darwins_personality"].translation().visit(module)
    _rewrite_asserts(module, *arguments)


rewrite.rewrite_asserts = _translate_first  # type: ignore[assignment]
