"""A Dockerfile, taken apart: what its stages do, in order.

It reads what docker/Dockerfile is written in: comments, and instructions on one line or continued.
Heredocs and instructions that take options beside ``COPY --from`` are refused. Variables are for
the shell of RUN lines alone.
"""

import json
import re
import shlex
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
    """Something that is not read here; the message has the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of a stage."""

    keyword: str
    value: str

    @property
    def words(self) -> list[str]:
        """The value as a shell would part it."""
        return shlex.split(self.value)

    @property
    def command(self) -> list[str]:
        """The value in its exec form, a JSON list of strings. Raises DockerfileError."""
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
    """From one FROM to the next."""

    image: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, keyword: str) -> Instruction:
        """The one that counts, of those of which only one does. Raises DockerfileError."""
        for instruction in reversed(self.instructions):
            if instruction.keyword == keyword:
                return instruction
        raise DockerfileError(f"stage {self.name} has no {keyword}")


def read_dockerfile(path: Path) -> list[Stage]:
    """Its stages. Raises DockerfileError."""
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
    """Instructions, each on one line; comments may stand between continued lines."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [line.strip() for line in joined.splitlines() if line.strip()]
