import dataclasses
import json
from pathlib import Path

import pytest

from tests.metal.hosted.symbols import SEARCHED, Symbols, differences, main, symbols_in

LISTING = """
                 (undefined) external _PyErr_Clear (dynamically looked up)
                 (undefined) external _malloc (from libSystem)
                 (undefined) weak external __ZdlPv (from libc++)
                 (undefined) external __ZN3mlx4core5arrayE (from libmlx)
0000000000002478 (__TEXT,__text) external _PyInit__ext
0000000000002500 (__TEXT,__text) non-external _helper
"""
CONTENT = b"..\0nanobind_system_libcpp_abi1_a1_v22\0.."
GOOD = symbols_in(LISTING, CONTENT)


def test_a_listing_is_read_by_library() -> None:
    found = symbols_in(LISTING, CONTENT)
    assert found == Symbols(
        imports={
            SEARCHED: ["_PyErr_Clear"],
            "libSystem": ["_malloc"],
            "libc++": ["__ZdlPv"],
            "libmlx": ["__ZN3mlx4core5arrayE"],
        },
        exports=["_PyInit__ext"],
        nanobind="nanobind_system_libcpp_abi1_a1_v22",
    )


def test_what_compilers_inline_differs_without_being_wrong() -> None:
    native = dataclasses.replace(GOOD, imports={**GOOD.imports, "libc++": ["__ZdlPvm"]})
    wrong, taste = differences(GOOD, native)
    assert not wrong
    assert taste == [
        "libc++: __ZdlPv in the cross build alone",
        "libc++: __ZdlPvm in this build alone",
    ]


@pytest.mark.parametrize(
    ("native", "said"),
    [
        (dataclasses.replace(GOOD, exports=["_PyInit__ext", "_other"]), "exports"),
        (dataclasses.replace(GOOD, nanobind="nanobind_v21"), "nanobind's tag"),
        (dataclasses.replace(GOOD, imports={**GOOD.imports, "Metal": ["_M"]}), "of this build"),
        (
            dataclasses.replace(GOOD, imports={**GOOD.imports, SEARCHED: ["_PyX", "_mlx"]}),
            "_mlx is left for dyld to search in this build",
        ),
    ],
)
def test_what_must_be_equal_is_named_where_it_is_not(
    native: Symbols, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "cross.json", tmp_path / "native.json"]
    for path, symbols in zip(paths, (GOOD, native), strict=True):
        path.write_text(json.dumps(dataclasses.asdict(symbols)))
    assert main(["compare", *map(str, paths)]) == 1
    assert said in capsys.readouterr().out
    assert main(["compare", str(paths[0]), str(paths[0])]) == 0
