from pathlib import Path

import pytest

from tests.metal.cross.mlx_wheels import LINUX_PACKAGES, MAC_PACKAGES, locked

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("package", sorted({*MAC_PACKAGES, *LINUX_PACKAGES}))
def test_an_entry_of_the_lock_has_its_version_and_hashes_and_no_marker(package: str) -> None:
    first, *hashes = locked(LOCK, package).split(" \\\n")
    assert first.startswith(f"{package}==")
    assert ";" not in first
    assert hashes
    assert all(line.startswith("    --hash=sha256:") for line in hashes)


def test_all_hashes_of_an_entry_are_found() -> None:
    lock = (
        "a==1 ; b \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\na-c==3 \\\n    --hash=sha256:3\n"
    )
    assert locked(lock, "a") == "a==1 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2"
    assert locked(lock, "a-c") == "a-c==3 \\\n    --hash=sha256:3"


@pytest.mark.parametrize("lock", ["", "mlx-lm==1 \\\n    --hash=sha256:1\n", "mlx==1\n"])
def test_a_lock_without_the_entry_is_refused(lock: str) -> None:
    with pytest.raises(ValueError, match="0 entries of mlx"):
        locked(lock, "mlx")
