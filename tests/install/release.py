"""Prints the texts of a release, from CHANGELOG.md, pyproject.toml and the files of build/wheels.

    python -m tests.install.release notes [v0.1.0]
    python -m tests.install.release formula ADDRESS HOMEPAGE > quire.rb

notes: the section of a version. A tag must be that of pyproject.toml's version, and its section
must not say that it is not released yet: a tag that was set too early is refused.

formula: Homebrew's, for a tap of one's own, as Homebrew's collection takes no wheels. ADDRESS is
where the files are downloaded from. It installs what the lock in the archive of the sources names,
by version and hash, and quire's wheel: nothing is compiled.
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "wheels"
NOT_YET = "not released yet"
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+)(?:, (?P<when>.+))?$", re.MULTILINE)
PYTHON = "3.13"
# The oldest macOS of each wheel, by the name that Homebrew has for it.
MACS = {"macosx_26_0_arm64": "on_tahoe :or_newer", "macosx_14_0_arm64": "on_sequoia :or_older"}
BUILD_ONLY = "cmake nanobind ninja pathspec scikit-build-core"

FORMULA = """\
class Quire < Formula
  desc "{description}"
  homepage "{homepage}"
  url "{address}/{sources}"
  sha256 "{sources_hash}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

  # The libraries in wheels are signed as they are, and find each other.
  preserve_rpath

{wheels}
  def install
    system "python{python}", "-m", "venv", libexec
    pip = libexec/"bin/pip"
    system pip, "install", "--no-cache-dir", "--only-binary=:all:", "--require-hashes",
           "--requirement", "configs/locks/requirements.lock"
    resource("wheel").stage {{ system pip, "install", "--no-deps", *Dir["*.whl"] }}
    system pip, "uninstall", "--yes", *%w[{build_only}]
    bin.install_symlink libexec/"bin/quire"
  end

  def caveats
    <<~EOS
      A small model comes along:
        quire serve demo
    EOS
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/quire --version")
    port = free_port
    server = spawn bin/"quire", "serve", "demo", "--port", port.to_s
    begin
      system "curl", "--silent", "--fail", "--retry", "60", "--retry-delay", "1",
             "--retry-connrefused", "http://127.0.0.1:#{{port}}/health"
    ensure
      Process.kill "TERM", server
      Process.wait server
    end
  end
end
"""
WHEEL = """\
  {system} do
    resource "wheel" do
      url "{address}/{name}", using: :nounzip
      sha256 "{hash}"
    end
  end
"""


def notes(changes: str, version: str, tag: str = "") -> str:
    """Return the section of a version. Raises ValueError where there is none, or it cannot be
    released."""
    if tag and tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml's version {version}")
    headings = list(HEADING.finditer(changes))
    heading = next((found for found in headings if found["version"] == version), None)
    if heading is None:
        raise ValueError(f"CHANGELOG.md has no section of {version}")
    if tag and heading["when"] == NOT_YET:
        raise ValueError(f"CHANGELOG.md says of {version} that it is {NOT_YET}")
    following = [found.start() for found in headings if found.start() > heading.end()]
    return changes[heading.end() : min(following, default=len(changes))].strip() + "\n"


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def formula(folder: Path, address: str, homepage: str) -> str:
    """Raises ValueError where a file is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = only(folder, f"quire-{version()}.tar.gz")
    tag = "cp" + PYTHON.replace(".", "")
    wheels = []
    for platform, system in MACS.items():
        wheel = only(folder, f"quire-{version()}-{tag}-{tag}-{platform}.whl")
        wheels.append(
            WHEEL.format(system=system, address=address, name=wheel.name, hash=sha256(wheel))
        )
    return FORMULA.format(
        description=project["description"],
        homepage=homepage,
        address=address,
        sources=sources.name,
        sources_hash=sha256(sources),
        python=PYTHON,
        wheels="\n".join(wheels),
        build_only=BUILD_ONLY,
    )


def only(folder: Path, name: str) -> Path:
    """Raises ValueError where the file is missing."""
    if not (folder / name).is_file():
        raise ValueError(f"{folder / name} is missing")
    return folder / name


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(command: str, *arguments: str) -> int:
    try:
        if command == "notes":
            changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
            print(notes(changes, version(), *arguments), end="")
        else:
            print(formula(WHEELS, *arguments), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
