"""Modules called as Ray's are: our thin files are imported over them, with Ray or without."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, **attributes: dict[str, Any]) -> dict[str, ModuleType]:
    """Put the modules in place. attributes: of each, dots being written __."""
    found: dict[str, ModuleType] = {}
    for written, values in attributes.items():
        name = written.replace("__", ".")
        module = ModuleType(name)
        module.__dict__.update(values)
        found[name] = module
        monkeypatch.setitem(sys.modules, name, module)
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        if parent in found:
            setattr(found[parent], last, module)
    return found


def forget(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have one of ours imported again."""
    monkeypatch.delitem(sys.modules, name, raising=False)


@dataclass(frozen=True)
class ReplicaId:
    unique_id: str


def replica(name: str) -> SimpleNamespace:
    """A RunningReplica."""
    return SimpleNamespace(replica_id=ReplicaId(name))


def pending(*arguments: object) -> SimpleNamespace:
    """A PendingRequest."""
    return SimpleNamespace(
        args=list(arguments), routing_context=SimpleNamespace(should_backoff=False)
    )
