import re

import yaml  # type: ignore[import-untyped]

from server.config import Config
from tests.docker.boards import DOCKER

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
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
