"""Makes a Mac's process of this one, before anything of quire is imported."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

# By its path: the package `tests` imports quire's extension.
_spec = spec_from_file_location("darwins_personality", Path(__file__).parents[1] / "personality.py")
assert _spec is not None
assert _spec.loader is not None
_personality = module_from_spec(_spec)
sys.modules[_spec.name] = _personality
_spec.loader.exec_module(_personality)
_personality.take_on()
