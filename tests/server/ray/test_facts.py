"""Machines that are not alike."""

from pathlib import Path

import pytest

from server.ray import facts
from server.ray.facts import UnlikeError, check_alike, facts_of


def test_machines_with_the_same_files_and_versions_are_alike(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "version", lambda name: f"{name} 1")
    found = facts_of(tiny_model)
    check_alike("here", found, facts_of(tiny_model))
    assert found["ray"] == "ray 1"
    for name in found:
        with pytest.raises(UnlikeError, match=f"here is not like the head.*{name} is .* other"):
            check_alike("here", found, {**found, name: "other"})
