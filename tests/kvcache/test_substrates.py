import pytest

from kvcache.substrates import Substrate


@pytest.mark.parametrize(
    ("substrate", "setting", "on_gpu", "is_dense", "words"),
    [
        (Substrate.SPARSE, "sparse", True, False, "sparse on Metal"),
        (Substrate.PAGED, "paged", True, False, "paged on Metal"),
        (Substrate.METAL_DENSE, "dense", True, True, "dense on Metal"),
        (Substrate.POSIX, "posix", False, False, "posix"),
    ],
)
def test_a_substrate_says_where_it_is(
    substrate: Substrate, setting: str, on_gpu: bool, is_dense: bool, words: str
) -> None:
    assert (substrate.setting, substrate.on_gpu, substrate.is_dense) == (setting, on_gpu, is_dense)
    assert str(substrate) == words
