import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.doctor.facts import facts as facts_of_this_process
from engine.doctor.report import SCHEMA, Extension
from engine.machine import MachineMemory
from kvcache.substrates import Substrate
from tests.engine.doctor.reports import DEVICE, FAILED, GIB, MAC, PASSED, SAID, with_sparse


def test_a_machine_serves_where_what_was_chosen_works() -> None:
    assert MAC.serves
    assert not replace(MAC, chosen=None).serves
    assert not replace(MAC, chosen=Substrate.PAGED).serves
    assert not replace(MAC, chosen=Substrate.METAL_DENSE).serves
    assert replace(MAC, chosen=Substrate.POSIX).serves


def test_wrong_arithmetic_does_not_change_the_choice_but_the_verdict() -> None:
    report = with_sparse(kernels=FAILED)
    assert report.of(Substrate.SPARSE).refusal == ""
    assert report.of(Substrate.SPARSE).fault == "map: refused"
    assert not report.serves


def test_versions_match_or_they_do_not() -> None:
    assert MAC.extension.matches
    assert not Extension("0.32.5", "", SAID).matches
    assert not Extension("0.32.4", "it cannot be loaded", {}).matches


@pytest.mark.parametrize(
    ("memory", "usable"),
    [
        (MachineMemory(12 * GIB, 10 * GIB), 9 * GIB),
        (MachineMemory(12 * GIB, 5 * GIB), 5 * GIB),
        (MachineMemory(2 * GIB, 5 * GIB), 0),
        (MachineMemory(12 * GIB, 5 * GIB, on_gpu=True), 9 * GIB),
    ],
)
def test_what_is_usable_is_what_a_plan_starts_from(memory: MachineMemory, usable: int) -> None:
    assert replace(MAC, memory=memory).usable_bytes == usable


def test_a_report_is_one_json_object_with_a_version() -> None:
    said = json.loads(json.dumps(MAC.as_json()))
    assert said["schema"] == SCHEMA == 1
    assert set(said) == {
        "schema", "serves", "machine", "python", "extension", "metal", "substrates", "wheel",
        "pace", "pressure", "memory", "choice",
    }  # fmt: skip
    assert said["machine"]["model"] == "Mac15,6"
    assert said["extension"]["matches"]
    assert said["metal"] == DEVICE.said
    sparse, paged, dense, posix = said["substrates"]
    assert (sparse["works"], paged["works"], dense["works"]) == (True, False, False)
    assert (dense["name"], dense["on_gpu"]) == ("dense", True)
    assert dense["canary"] is dense["kernels"] is dense["release_test"] is None
    assert paged["fault"] == "map: refused"
    assert posix["canary"]["steps"][0]["name"] == "map"
    assert said["choice"] == {
        "name": "sparse",
        "on_gpu": True,
        "maps_while_running": False,
        "reasons": ["sparse on Metal: it passed its canary"],
        "warnings": [],
    }
    assert said["memory"]["usable_bytes"] == 9 * GIB


def test_a_machine_without_a_choice_is_json_too() -> None:
    said = json.loads(json.dumps(replace(MAC, chosen=None, device=None).as_json()))
    assert said["choice"]["name"] is said["choice"]["on_gpu"] is said["metal"] is None
    assert not said["serves"]


def test_metal_md_names_the_places_of_what_only_a_mac_can_say() -> None:
    said = replace(MAC, pace=PASSED).as_json()
    facts = {"extension": facts_of_this_process().keys(), "substrates": said["substrates"][0]}
    text = (Path(__file__).parents[3] / "metal_ext/README.md").read_text()
    places = re.findall(r"^\| F\d+ \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(places) == 10
    for place in places:
        first, _, second = place.partition(".")
        assert first in said
        assert not second or second in facts[first]
