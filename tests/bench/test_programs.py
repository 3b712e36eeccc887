from pathlib import Path

from tests.bench.programs import mlx_lm_server, quire


def test_only_who_is_compared_by_it_has_to_prove_its_products() -> None:
    assert mlx_lm_server(Path("model"), 4).proves_products
    assert not quire(Path("model"), 1).proves_products
    assert quire(Path("model"), 1, "dense").label == "quire dense"
