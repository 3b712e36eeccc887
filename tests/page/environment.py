"""The page in a real browser. This module installs Debian's Chromium, and Playwright and axe below
``build/page``."""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "page"
DRIVER = BUILT / "driver"
AXE = DRIVER / "axe_playwright_python" / "axe.min.js"
LOCK = ROOT / "configs/locks/page.lock"
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-noto-core")
INSTALL_TIMEOUT_S = 600


def install() -> Path:
    """Return the browser's program. Raises CalledProcessError."""
    _install_driver()
    sys.path.append(str(DRIVER))
    _run(str(ROOT / "tests/packages.sh"), *PACKAGES)
    browser = shutil.which("chromium")
    assert browser is not None, "the package chromium has no program"
    return Path(browser)


def _install_driver() -> None:
    """The driver has a folder of its own: no other installed package changes."""
    stamp = DRIVER / "installed"
    if stamp.is_file() and stamp.read_bytes() == LOCK.read_bytes():
        return
    shutil.rmtree(DRIVER, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, "--require-hashes", "--target", str(DRIVER), "-r", str(LOCK))
    shutil.copy(LOCK, stamp)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
