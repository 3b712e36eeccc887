"""Rules of the Compose files and the Dockerfile, read without Docker."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from server.config import Config
from server.ray.ray_process import HEAD_PORT, STOP_TIMEOUT_S
from tests.docker.boards import DOCKER, ROOT
from tests.docker.steps import DOCKERFILE, context, read_dockerfile

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


COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CLUSTER_LOCK = "configs/locks/requirements-cluster.lock"
CLUSTER = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())
MACHINES = CLUSTER["services"]
HEAD = MACHINES["quire-head"]
DEMANDED = re.compile(r"\$\{([A-Z_]+):\?")


def test_every_port_is_this_machines_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_of_others_have_a_version() -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


def test_boards_alone_are_the_normal_case() -> None:
    assert SERVICES["quire"]["profiles"] == ["container"]
    assert not any("profiles" in SERVICES[name] for name in ("prometheus", "grafana"))
    assert "quire" not in SERVICES["prometheus"].get("depends_on", [])


def test_nothing_starts_without_its_secrets_and_none_is_written_here() -> None:
    example = (DOCKER / ".env.example").read_text()
    demanded = set(DEMANDED.findall((DOCKER / "compose.yaml").read_text()))
    assert demanded == {"QUIRE_API_KEYS", "QUIRE_SCRAPE_KEY", "GRAFANA_PASSWORD"}
    assert all(re.search(rf"^{name}=$", example, re.MULTILINE) for name in demanded)
    secret = COMPOSE["secrets"]["scrape_key"]["environment"]
    assert secret in demanded


def test_variables_of_the_container_are_settings() -> None:
    fields = {
        f"QUIRE_{section}__{name}".upper()
        for section, values in Config().model_dump().items()
        for name in values
    }
    assert set(SERVICES["quire"]["environment"]) <= fields


def test_nobody_can_do_more_than_it_must() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert SERVICES["quire"]["read_only"] is True


def test_an_answer_has_time_to_end_before_the_container_is_killed() -> None:
    grace = int(SERVICES["quire"]["stop_grace_period"].removesuffix("s"))
    assert grace > Config().server.drain_s + 30, "the engine may take so long to stop"


def test_grafana_finds_its_boards_and_its_prometheus() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "quire.yml").read_text())[
        "providers"
    ]
    prometheus = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert source["uid"] == "quire-prometheus"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    mounted = {
        volume.split(":")[1]: volume.split(":")[0]
        for volume in SERVICES["grafana"]["volumes"]
        if volume.startswith("./")
    }
    assert (DOCKER / mounted[provider["options"]["path"]]).is_dir()
    assert all((DOCKER / place).is_dir() for place in mounted.values())


def test_a_cluster_has_three_machines_and_one_port_on_this_machine_alone() -> None:
    assert len(MACHINES) == 3
    assert HEAD["command"] == ["head", "${QUIRE_MODEL:-demo}", str(len(MACHINES))]
    ports = [port for its in MACHINES.values() for port in its.get("ports", [])]
    assert ports == ["127.0.0.1:${QUIRE_PORT:-8001}:8000"]
    assert all(its["hostname"] == name for name, its in MACHINES.items())
    workers = [its for its in MACHINES.values() if its is not HEAD]
    assert [its["command"] for its in workers] == [["join", f"quire-head:{HEAD_PORT}"]] * 2


def test_the_key_of_a_cluster_is_a_file_and_nothing_else() -> None:
    assert CLUSTER["secrets"] == {"cluster_key": {"file": "${QUIRE_CLUSTER_KEY:-./cluster.key}"}}
    for its in MACHINES.values():
        assert its["secrets"] == ["cluster_key"]
        assert "key" not in " ".join(its["entrypoint"] + its["command"]).lower()
    assert "docker/cluster.key" in (ROOT / ".gitignore").read_text().splitlines()
    script = (DOCKER / "cluster.sh").read_text()
    assert "key=/run/secrets/cluster_key" in script
    assert "cat " not in script


def test_machines_of_a_cluster_can_do_no_more_than_they_must() -> None:
    for its in MACHINES.values():
        assert its["cap_drop"] == ["ALL"]
        assert its["security_opt"] == ["no-new-privileges:true"]
        assert its["read_only"] is True
        assert its["environment"]["XDG_STATE_HOME"].startswith("/tmp/")
        assert its["build"]["args"] == {"LOCK": CLUSTER_LOCK}
        grace = int(its["stop_grace_period"].removesuffix("s"))
        assert grace > Config().server.drain_s + 30 + STOP_TIMEOUT_S
    assert (ROOT / CLUSTER_LOCK).is_file()


def test_prometheus_asks_the_head_of_a_cluster_by_a_name_that_it_answers_to() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (names,) = (its["dns_sd_configs"][0]["names"] for its in jobs if "dns_sd_configs" in its)
    assert HEAD["environment"]["QUIRE_ACCESS__ALLOWED_HOSTS"] in names
    assert HEAD["hostname"] in names


def test_the_script_of_a_machine_is_one_that_a_shell_reads() -> None:
    subprocess.run(["sh", "-n", str(DOCKER / "cluster.sh")], check=True, timeout=20)


@pytest.mark.parametrize("arguments", [["head", "demo", "3"], ["join", "there:1"], ["other"]])
def test_a_machine_that_does_not_get_into_its_cluster_ends_with_an_error(
    tmp_path: Path, arguments: list[str]
) -> None:
    quire = tmp_path / "quire"
    quire.write_text("#!/bin/sh\nexit 3\n")
    quire.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}
    command = ["sh", str(DOCKER / "cluster.sh"), *arguments]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=20).returncode
