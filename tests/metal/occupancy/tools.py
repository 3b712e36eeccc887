"""Builds Mesa's compiler for Apple's GPUs: ``python -m tests.metal.occupancy.tools FOLDER``.

Its source, a translator to SPIR-V and what builds it are Debian trixie's packages, by apt with
lists of its own, so that an older system stays as it is. Nothing is installed; minutes, once.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.metal.msl.translate import replaced
from tests.metal.occupancy.kernels import Tools

ROOT = Path(__file__).parents[3]
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
RELEASE = "trixie"
# The translator with its libraries, and Python packages of Mesa's build.
PACKAGES = (
    *("llvm-spirv-19", "libllvmspirvlib19.1", "libllvm19", "libc6", "libstdc++6", "libgcc-s1"),
    *("zlib1g", "libzstd1", "libxml2", "libffi8", "libedit2", "libtinfo6", "libbsd0", "libmd0"),
    *("libz3-4", "liblzma5", "meson", "python3-mako", "python3-markupsafe", "python3-yaml"),
    "python3-packaging",
)
OFF = ("llvm", "glx", "egl", "gbm", "gles1", "gles2", "valgrind", "libunwind", "shared-glapi")
OPTIONS = (
    *("-Dbuildtype=release", "-Db_ndebug=false", "-Dtools=asahi", "-Dvulkan-drivers=asahi"),
    *("-Dgallium-drivers=", "-Dplatforms=", "-Dvideo-codecs=", "-Dmesa-clc=system"),
    *("-Dopengl=false", "-Dbuild-tests=false", "-Dxmlconfig=disabled"),
    *(f"-D{its}=disabled" for its in OFF),
)


def archive() -> str:
    """Where this machine's own packages come from."""
    form = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(form, check=True, capture_output=True, text=True).stdout.split()
    return next(its for its in found if its.rstrip("/").endswith("/debian"))


def apt_variables(folder: Path) -> dict[str, str]:
    """For apt with lists of its own."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    line = f"[signed-by={KEYS}] {archive()} {RELEASE} main\n"
    (folder / "sources.list").write_text(f"deb {line}deb-src {line}")
    (folder / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{folder}/sources.list";\nDir::Etc::SourceParts "-";\n'
        f'Dir::State::Lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
        'APT::Sandbox::User "root";\n'
    )
    return os.environ | {"APT_CONFIG": str(folder / "apt.conf")}


def fetch(folder: Path) -> None:
    """The packages into folder/root, Mesa's source into folder/mesa."""
    variables = apt_variables(folder / "apt")
    debs = folder / "debs"
    debs.mkdir(exist_ok=True)
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "download", "-q", *PACKAGES],
        ["apt-get", "source", "-q", "--download-only", "mesa"],
    ):
        subprocess.run(command, cwd=debs, env=variables, check=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(folder / "root")], check=True)
    (folder / "mesa").mkdir(exist_ok=True)
    (source,) = debs.glob("mesa_*.orig.tar.xz")
    unpack = ["tar", "xf", str(source), "--strip-components=1", "-C", str(folder / "mesa")]
    subprocess.run(unpack, check=True)


def build(folder: Path) -> None:
    """Only the compiler, and what makes its library. Mesa's build looks for two programs that it
    would make with LLVM: one is ours, the other is made first."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    bindings = programs / "vtn_bindgen"
    script(
        programs / "mesa_clc", f'"{sys.executable}" -m tests.metal.occupancy.mesa_clc {folder} "$@"'
    )
    script(bindings, "exit 1")
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    packages = folder / "root/usr/lib/python3/dist-packages"
    variables = os.environ | {"PATH": path, "PYTHONPATH": f"{packages}:{ROOT}"}
    made = folder / "build"

    def run(*command: str | Path) -> None:
        subprocess.run(list(map(str, command)), env=variables, check=True)

    # Programs that are there need not be waited for; older versions of meson will not have it.
    file = folder / "mesa/src/asahi/libagx/meson.build"
    text = replaced(file.read_text(), "[prog_mesa_clc, agx_pack]", "[agx_pack]")
    file.write_text(replaced(text, "  depends : [prog_vtn_bindgen],\n", ""))
    # Its own program for SPIR-V has all that the one for bindings needs, and is built alone.
    spirv = folder / "mesa/src/compiler/spirv"
    shutil.copyfile(spirv / "vtn_bindgen.c", spirv / "spirv2nir.c")
    meson = folder / "root/usr/bin/meson"
    run(sys.executable, meson, "setup", "--wipe", made, folder / "mesa", *OPTIONS)
    run("ninja", "-C", made, "src/compiler/spirv/spirv2nir")
    shutil.copyfile(made / "src/compiler/spirv/spirv2nir", bindings)
    run("ninja", "-C", made, "src/asahi/clc/asahi_clc")


def script(file: Path, command: str) -> None:
    """A program of one command."""
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)


def main() -> None:
    """Once; a build that was interrupted begins again."""
    folder = Path(sys.argv[1]).absolute()
    if (folder / "complete").is_file() and Tools(folder).compiler.is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fetch(folder)
    build(folder)
    (folder / "complete").touch()


if __name__ == "__main__":
    main()
