"""Follows docker/Dockerfile by hand, in clean roots, and serves from the result.

``python -m tests.docker.steps`` needs root, debootstrap, unshare, nsenter and ip. Every stage is a
directory that begins as the Debian that the image is made of; RUN lines are executed in it as they
stand, and what is served at the end has a process, a mount and a network namespace of its own, a
root that cannot be written, and the image's user, environment, entry point and health check.
Differs from a container: no control group, no seccomp filter, all of root's capabilities in RUN.
"""

import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = frozenset(
    [
        "ARG",
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "RUN",
        "STOPSIGNAL",
        "USER",
        "WORKDIR",
    ]
)
HEALTH_COMMAND = re.compile(r"(?:--[a-z-]+=\S+ )*CMD (\[.*\])")


class DockerfileError(ValueError):
    """An instruction that is not read here; the message has the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    keyword: str
    value: str

    @property
    def words(self) -> list[str]:
        """Split the value as a shell would."""
        return shlex.split(self.value)

    @property
    def command(self) -> list[str]:
        """Return the value in its exec form, a JSON list of strings. Raises DockerfileError."""
        text = self.value
        if self.keyword == "HEALTHCHECK":
            found = HEALTH_COMMAND.fullmatch(text)
            text = found[1] if found else ""
        try:
            command = json.loads(text)
        except ValueError as error:
            raise DockerfileError(f"not in exec form: {self.keyword} {self.value}") from error
        return [str(word) for word in command]


@dataclass(slots=True)
class Stage:
    """The instructions from one FROM to the next."""

    image: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, keyword: str) -> Instruction:
        """Return the last instruction of a keyword, which alone counts. Raises DockerfileError."""
        for instruction in reversed(self.instructions):
            if instruction.keyword == keyword:
                return instruction
        raise DockerfileError(f"stage {self.name} has no {keyword}")


def read_dockerfile(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile of comments and instructions on one line or continued.
    Heredocs, and options beside ``COPY --from``, raise DockerfileError."""
    stages: list[Stage] = []
    for line in _joined(path.read_text()):
        keyword, _, value = line.partition(" ")
        value = value.strip()
        if keyword not in KNOWN or "<<" in value:
            raise DockerfileError(f"not read here: {line}")
        if keyword == "FROM":
            words = value.split()
            name = words[2] if len(words) == 3 else str(len(stages))
            stages.append(Stage(words[0], name))
        elif not stages:
            raise DockerfileError(f"before the first FROM: {line}")
        else:
            stages[-1].instructions.append(Instruction(keyword, value))
    return stages


def _joined(text: str) -> list[str]:
    """Join each instruction on one line; comments may stand between continued lines."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [line.strip() for line in joined.splitlines() if line.strip()]


ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
BUILT = ROOT / "build" / "docker"
STEP_TIMEOUT_S = 900
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 40
KEY = "the-key-of-these-steps"
# This machine's way to its registries goes along while RUN lines run, and is gone afterwards.
MACHINE_FILES = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
MACHINE_VARIABLES = ("PIP_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy")
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "cmake", "ld", "pip", "pip3")


@dataclass(slots=True)
class Image:
    """A stage as far as its instructions have been followed."""

    folder: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"}
    )
    work_folder: str = "/"
    user: str = "0:0"


def debian(release: str) -> Path:
    """Return the base image of that release, made once by debootstrap."""
    folder = BUILT / f"debian-{release}"
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run(["debootstrap", "--variant=minbase", release, str(folder)])
        (folder / "complete").touch()
    return folder


def build(stages: list[Stage]) -> Image:
    """Follow all stages; return the last one's image."""
    images: dict[str, Image] = {}
    for stage in stages:
        name, _, tag = stage.image.partition(":")
        assert name == "debian", stage.image
        assert tag.endswith("-slim"), stage.image
        image = Image(BUILT / f"stage-{stage.name}")
        shutil.rmtree(image.folder, ignore_errors=True)
        base = debian(tag.removesuffix("-slim"))
        run(["cp", "--archive", "--reflink=auto", str(base), str(image.folder)])
        (image.folder / "complete").unlink()
        for instruction in stage.instructions:
            follow(instruction, image, images)
        images[stage.name] = image
    return image


def follow(instruction: Instruction, image: Image, others: dict[str, Image]) -> None:
    """Change the image as an instruction says; ``serve`` follows those about its start."""
    if instruction.keyword == "RUN":
        begun = time.monotonic()
        with machine_files(image.folder):
            run(
                in_namespaces(image, ["/bin/sh", "-c", instruction.value]), machine_variables(image)
            )
        print(f"{time.monotonic() - begun:6.1f} s  RUN {instruction.value[:70]}", flush=True)
    elif instruction.keyword == "COPY":
        copy(instruction.words, image, others)
    elif instruction.keyword == "ARG":
        name, _, value = instruction.value.partition("=")
        image.environment[name] = value
    elif instruction.keyword == "ENV":
        for setting in instruction.words:
            name, _, value = setting.partition("=")
            image.environment[name] = value.replace("$PATH", image.environment["PATH"])
    elif instruction.keyword == "WORKDIR":
        image.work_folder = instruction.value
        inside(image, instruction.value).mkdir(parents=True, exist_ok=True)
    elif instruction.keyword == "USER":
        image.user = instruction.value


def copy(words: list[str], image: Image, others: dict[str, Image]) -> None:
    """Follow ``COPY [--from=STAGE] SOURCE... TARGET``."""
    *sources, target = [word for word in words if not word.startswith("--")]
    stage = next((word[len("--from=") :] for word in words if word.startswith("--from=")), None)
    goal = inside(image, os.path.join(image.work_folder, target))
    for source in sources:
        if stage is not None:
            run(["cp", "--archive", f"{inside(others[stage], source)}/.", f"{made(goal)}/"])
            continue
        for name in context(source):
            within = Path(name).name if name == source else os.path.relpath(name, source)
            shutil.copy2(ROOT / name, made((goal / within).parent) / Path(name).name)


def context(source: str) -> list[str]:
    """Return the files below a path that a build would be sent: those of the checkout that
    ``.dockerignore`` lets through."""
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert f"!{source}" in allowed, f"{source} is not in .dockerignore"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", source]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in found.stdout.splitlines() if (ROOT / name).is_file()]


# --- what is served ------------------------------------------------------------------------------


def serve(stage: Stage, image: Image) -> None:
    """Start the image as a container would be, send a chat, and end it. Raises AssertionError."""
    command = stage.last("ENTRYPOINT").command + stage.last("CMD").command
    refused = subprocess.run(
        in_namespaces(image, command, offline=True), env=image.environment, timeout=START_TIMEOUT_S,
        capture_output=True, text=True,
    )  # fmt: skip
    print(f"without a key: exit code {refused.returncode}: {refused.stderr.strip()}", flush=True)
    assert refused.returncode == 2, refused.stdout
    variables = image.environment | {"QUIRE_ACCESS__API_KEYS": KEY}
    print(f"serving as {image.user}, nothing can be written: {' '.join(command)}", flush=True)
    outer = subprocess.Popen(in_namespaces(image, command, offline=True), env=variables)
    try:
        inner = child_of(outer)
        wait_until_healthy(inner, stage, image, outer)
        answer = subprocess.run(
            ["nsenter", f"--target={inner}", "--net", sys.executable, "-m", __spec__.name, "ask"],
            check=True, timeout=START_TIMEOUT_S, capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        print(answer.stdout, end="")
        begun = time.monotonic()
        os.kill(inner, 15)
        assert outer.wait(STOP_TIMEOUT_S) == 0, outer.returncode
        print(f"SIGTERM: exit code 0 after {time.monotonic() - begun:.1f} s")
    finally:
        outer.kill()
        outer.wait(STOP_TIMEOUT_S)


def ask() -> None:
    """Send one chat from inside the server's network."""
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=30)
    chat = {"messages": [{"role": "user", "content": "What is quire?"}], "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat), headers)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    assert answer.status == 200, said
    print(f"{said['model']}: {said['choices'][0]['message']['content']!r}")


def wait_until_healthy(
    inner: int, stage: Stage, image: Image, outer: "subprocess.Popen[bytes]"
) -> None:
    """Run the image's own health check where a container's would run."""
    user, group = image.user.split(":")
    enter = ["nsenter", f"--target={inner}", "--net", "--pid", "--mount", "--root", "--wd"]
    check = [*enter, f"--setuid={user}", f"--setgid={group}", *stage.last("HEALTHCHECK").command]
    begun = time.monotonic()
    while time.monotonic() - begun < START_TIMEOUT_S:
        assert outer.poll() is None, f"it ended with {outer.returncode}"
        asked = subprocess.run(check, env=image.environment, stderr=subprocess.DEVNULL, timeout=30)
        if asked.returncode == 0:
            print(f"healthy after {time.monotonic() - begun:.1f} s")
            return
        time.sleep(0.5)
    raise AssertionError("it did not become healthy")


def child_of(process: "subprocess.Popen[bytes]") -> int:
    """Return the first process of the namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    begun = time.monotonic()
    while time.monotonic() - begun < START_TIMEOUT_S:
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.05)
    raise AssertionError("it did not start")


# --- roots ---------------------------------------------------------------------------------------


def in_namespaces(image: Image, command: list[str], *, offline: bool = False) -> list[str]:
    """Wrap a command that runs in an image's root. offline: as the image's user, with a network of
    its own and a root that cannot be written."""
    at = str(image.folder)
    entry = f"mount --bind '{at}' '{at}' && mount -t proc proc '{at}/proc'"
    if offline:
        entry += f" && mount -o remount,bind,ro '{at}' && ip link set lo up"
    user = image.user if offline else "0:0"
    entry += f" && exec chroot --userspec={user} '{at}' env --chdir={image.work_folder} \"$@\""
    spaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--net"] if offline else [])]
    return ["unshare", *spaces, "sh", "-c", entry, "sh", *command]


@contextmanager
def machine_files(folder: Path) -> Iterator[None]:
    """Lay this machine's files into the root while something is installed."""
    absent = []
    kept: dict[Path, bytes] = {}
    for name in MACHINE_FILES:
        here, there = Path(name), folder / name.lstrip("/")
        if here.is_file():
            if there.is_file():
                kept[there] = there.read_bytes()
            else:
                absent.append(there)
            made(there.parent)
            shutil.copyfile(here, there)
    yield
    for there in absent:
        there.unlink(missing_ok=True)
    for there, before in kept.items():
        there.write_bytes(before)


def machine_variables(image: Image) -> dict[str, str]:
    """Return the image's environment, and the variables that lead to the registries."""
    machine = {
        name: value for name, value in os.environ.items() if name.startswith(MACHINE_VARIABLES)
    }
    return machine | image.environment | {"HOME": "/root"}


def compilers_in(image: Image) -> list[str]:
    """Return the programs of its path that build programs or install packages."""
    path = image.environment["PATH"].split(":")
    return [name for name in COMPILERS for at in path if inside(image, f"{at}/{name}").exists()]


def inside(image: Image, path: str) -> Path:
    return image.folder / path.lstrip("/")


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(command: list[str], variables: dict[str, str] | None = None) -> None:
    """Raises CalledProcessError; the command's output is printed then."""
    try:
        subprocess.run(
            command, env=variables, check=True, timeout=STEP_TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        sys.stdout.write(error.output.decode(errors="replace")[-8000:])
        raise


def main() -> None:
    if sys.argv[1:] == ["ask"]:
        ask()
        return
    begun = time.monotonic()
    stages = read_dockerfile(DOCKERFILE)
    image = build(stages)
    assert not (left := compilers_in(image)), f"the final stage has {left}"
    size = subprocess.run(["du", "-sm", image.folder], check=True, capture_output=True, text=True)
    print(f"final stage: {size.stdout.split()[0]} MiB, no compiler", flush=True)
    serve(stages[-1], image)
    for stage in BUILT.glob("stage-*"):
        shutil.rmtree(stage)
    print(f"1 passed, 0 failed  # the Dockerfile's steps, in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
