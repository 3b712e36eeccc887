import re

from tests.docker.dockerfile import read_dockerfile
from tests.docker.steps import DOCKERFILE, context

STAGES = read_dockerfile(DOCKERFILE)
BUILD, FINAL = STAGES


def test_both_stages_are_the_same_debian() -> None:
    assert BUILD.image == FINAL.image
    assert re.fullmatch(r"debian:[a-z]+-slim", BUILD.image)


def test_what_is_installed_is_locked() -> None:
    (locked,) = (one for one in BUILD.instructions if "--requirement" in one.value)
    assert "--require-hashes" in locked.value
    (own,) = (one for one in BUILD.instructions if "--no-build-isolation" in one.value)
    assert "--no-deps" in own.value
    assert not any("pip install" in one.value for one in FINAL.instructions)


def test_the_image_serves_as_nobody_in_particular_and_is_told_to_end() -> None:
    user, group = FINAL.last("USER").value.split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert FINAL.last("ENTRYPOINT").command == ["tini", "--", "quire", "serve"]
    assert FINAL.last("STOPSIGNAL").value == "SIGTERM"
    assert "/health" in " ".join(FINAL.last("HEALTHCHECK").command)


def test_the_health_check_is_python() -> None:
    program, option, text = FINAL.last("HEALTHCHECK").command
    assert (program, option) == ("python", "-c")
    compile(text, "health check", "exec")


def test_what_is_copied_is_in_the_context_and_nothing_else_is() -> None:
    sources = {
        word
        for stage in STAGES
        for one in stage.instructions
        if one.keyword == "COPY" and not one.value.startswith("--from")
        for word in one.words[:-1]
    }
    assert all(context(source) for source in sources)
    listed = (DOCKERFILE.parents[1] / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in listed if line.startswith("!")} == sources


def test_no_file_names_a_registry() -> None:
    known = {"http://prometheus:9090"}
    written = [*DOCKERFILE.parent.rglob("*.y*ml"), *DOCKERFILE.parent.rglob("*.py")]
    for path in [DOCKERFILE, *written, DOCKERFILE.parents[1] / ".dockerignore"]:
        found = set(re.findall(r"\w+://[\w.:/-]+", path.read_text()))
        assert found <= known, path
