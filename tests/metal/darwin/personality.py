"""What quire's own modules see of Python on a Mac, in a process on Linux.

Only they see it: their ``import sys`` is another module than the libraries'. Their source is
changed on its way to the compiler.
"""

import ast
import importlib
import os
import platform
import resource
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

GPU = "tests.metal.darwin.gpu"
OURS = ("server", "engine", "kvcache", "metal_ext", "tests")
NOT_OURS = "tests.metal.darwin"
RUNG = Path(__file__).parent
FIGURES = Path(os.environ.get("DARWIN_FIGURES", ""))
INFINITY = 2**63 - 1
"""A Mac's RLIM_INFINITY."""
ABSENT = ("/proc", "/sys/")
"""Folders of Linux."""
INSTEAD = {
    "/usr/sbin/sysctl": str(RUNG / "programs" / "sysctl"),
    "/usr/bin/pmset": str(RUNG / "programs" / "pmset"),
    "/usr/bin/caffeinate": str(RUNG / "programs" / "caffeinate"),
}
"""Programs of macOS, and what stands in for them."""
LACKS = {
    "os": ("memfd_create", "sched_getaffinity", "sched_setaffinity", "pidfd_open"),
}


class StandIn(ModuleType):
    """A module as it is on a Mac: other names, and without some."""

    def __init__(self, real: ModuleType, other: dict[str, Any]) -> None:
        super().__init__(f"darwins_{real.__name__}")
        lacks = LACKS.get(real.__name__, ())
        self.__dict__.update(_real=real, _lacks=lacks, _replaced={}, **other)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(f"a Mac's {self._real.__name__} has no {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            self._replaced.setdefault(name, getattr(self._real, name))
            setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        setattr(self._real, name, self._replaced.pop(name))


def figures_of_memory() -> dict[str, int]:
    """Of the Mac, in bytes."""
    names = ("sysctl/hw.memsize", "memory/available", "memory/free")
    return {Path(name).name: int((FIGURES / name).read_text()) for name in names}


def virtual_memory() -> Any:
    """As psutil says it on a Mac."""
    import psutil

    found = figures_of_memory()
    total, available = found["hw.memsize"], found["available"]
    usual = psutil.virtual_memory()
    percent = round((total - available) / total * 100, 1)
    return usual._replace(total=total, available=available, percent=percent, free=found["free"])


def give_resource_infinity() -> None:
    """resource with a Mac's infinity, for everybody: quire itself replaces parts of it."""
    get, set_ = resource.getrlimit, resource.setrlimit
    here = resource.RLIM_INFINITY

    def getrlimit(number: int) -> tuple[int, ...]:
        return tuple(INFINITY if n == here else n for n in get(number))

    def setrlimit(number: int, limits: tuple[int, int]) -> None:
        soft, hard = (here if n == INFINITY else n for n in limits)
        set_(number, (soft, hard))

    vars(resource).update(RLIM_INFINITY=INFINITY, getrlimit=getrlimit, setrlimit=setrlimit)


def exit_at_once(code: int) -> None:
    """os._exit, when the device has said what it found."""
    if GPU in sys.modules:
        sys.modules[GPU].tell_mistakes()
    os._exit(code)


def stand_ins() -> dict[str, StandIn]:
    """By the name of the real one."""
    version = ("26.1", ("", "", ""), "arm64")
    other: dict[str, dict[str, Any]] = {
        "sys": {"platform": "darwin"},
        "os": {"_exit": exit_at_once},
        "platform": {
            "system": lambda: "Darwin",
            "machine": lambda: "arm64",
            "mac_ver": lambda: version,
        },
        "psutil": {"virtual_memory": virtual_memory},
    }
    real = {"sys": sys, "os": os, "platform": platform}
    real["psutil"] = importlib.import_module("psutil")
    return {name: StandIn(real[name], names) for name, names in other.items()}


class Translation(ast.NodeTransformer):
    """Source of ours: imports a Mac's modules, and knows no folder of Linux."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            if alias.name in self._modules:
                alias.asname = alias.asname or alias.name
                alias.name = f"darwins_{alias.name}"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module in self._modules and not node.level:
            node.module = f"darwins_{node.module}"
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            if node.value.startswith(ABSENT):
                return ast.copy_location(ast.Constant("/linux" + node.value), node)
            return ast.copy_location(ast.Constant(INSTEAD.get(node.value, node.value)), node)
        return node


def translation() -> Translation:
    """That of this process."""
    begin = "darwins_"
    return Translation([n.removeprefix(begin) for n in sys.modules if n.startswith(begin)])


class OurLoader(SourceFileLoader):
    """Loads what the translation makes of a file. PYTHONPYCACHEPREFIX keeps its bytecode apart."""

    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> Any:
        """Compile it."""
        if isinstance(data, bytes):
            data = translation().visit(ast.parse(data, path))
        return super().source_to_code(data, path, _optimize=_optimize)


class OurFinder(MetaPathFinder):
    """Finds modules of ours, and tells what others have been loaded."""

    def __init__(self, after: dict[str, str]) -> None:
        """after: what gpu.py does when a module has been loaded."""
        self._after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Look where everybody looks."""
        if name == "metal_ext":
            path = [os.environ["DARWIN_EXTENSION"]]  # before its sources, wherever we are
        ours = name.partition(".")[0] in OURS and not name.startswith(NOT_OURS)
        if not ours and name not in self._after:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        if ours and isinstance(spec.loader, SourceFileLoader):
            spec.loader = OurLoader(name, spec.loader.path)
        if name in self._after:
            self._tell(spec.loader, self._after[name])
        return spec

    def _tell(self, loader: Any, what: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            tell_gpu(what, module)

        loader.exec_module = exec_module


def take_on() -> None:
    """This process is a Mac's from now on."""
    assert sys.pycache_prefix, "bytecode of translated sources must be kept apart"
    # Its finder knows the installed extension only.
    sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
    give_resource_infinity()
    found = stand_ins()
    sys.modules.update({f"darwins_{name}": module for name, module in found.items()})
    after = {"mlx.core": "choose", "metal_ext": "guard", "kvcache.backends.metal": "begin"}
    sys.meta_path.insert(0, OurFinder(after))


def tell_gpu(what: str, module: ModuleType) -> None:
    """A module has been loaded that the GPU has to do with."""
    getattr(importlib.import_module(GPU), what)(module)
