import pytest

from metal_ext.environment import RESIDENCY_VARIABLE, prepare
from tests.metal_ext.programs import output_of


@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [("darwin", {}, "20"), ("darwin", {RESIDENCY_VARIABLE: "7"}, "7"), ("linux", {}, None)],
)
def test_a_mac_leaves_room_for_our_residency_sets_unless_told_otherwise(
    platform: str, before: dict[str, str], after: str | None
) -> None:
    environment = dict(before)
    prepare(environment, platform)
    assert environment.get(RESIDENCY_VARIABLE) == after


def test_it_is_set_before_mlx_is_imported() -> None:
    assert (
        output_of("""
        import os, sys
        sys.platform = "darwin"
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "mlx.core":
                    print(os.environ.get("MLX_RESIDENCY_SET_MAX_PCT"))
        sys.meta_path.insert(0, Finder())
        import metal_ext
    """)
        == "20"
    )
