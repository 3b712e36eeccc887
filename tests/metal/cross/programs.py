"""Programs that only a Mac can run, compiled and linked here, so that they are known to compile."""

import subprocess
import tempfile
from pathlib import Path

from .commands import compiling, refusal
from .wheel_build import ROOT, Target, driver


def complaints(target: Target) -> list[str]:
    """Why tests/metal/hosted/pipelines.cpp would not build on a runner; empty where it would."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "kernel_texts.cpp"
        embed = ROOT / "metal_ext/kernels/metal/embed.cmake"
        subprocess.run(["cmake", f"-DOUTPUT={texts}", "-P", str(embed)], check=True)
        sources = [
            ROOT / "tests/metal/hosted/pipelines.cpp",
            ROOT / "metal_ext/csrc/core/metal/kernel_text.cpp",
            texts,
        ]
        objects = []
        for source in sources:
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            said = refusal(target, [*compiling(target), "-o", objects[-1], "-c", str(source)])
            if said:
                return [f"{source.name} does not compile: {said}"]
        link = [*driver(target), *objects, "-o", str(Path(folder) / "pipelines")]
        said = refusal(target, [*link, "-framework", "Metal", "-framework", "Foundation"])
    return [f"pipelines does not link: {said}"] if said else []
