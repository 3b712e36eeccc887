"""No document denies what the code serves."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.build import unserved
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES, read_spec
from kvcache.kv_backends import KVBackend
from server.catalogue.lookup import aliases
from tests.budget import ROOT, git
from tests.families import PUBLISHED

# By ``model_type``, how documents write the family's name.
NAMES = {
    "llama": r"Llama[ -]3",
    "qwen2": r"Qwen2\.5",
    "qwen3": r"Qwen3\b",
    "qwen3_moe": r"mixtures|MoE\b",
    "qwen3_next": r"Qwen3-Next",
    "qwen3_5": r"Qwen3\.[568]|hybrids?\b",
    "qwen3_5_moe": r"Qwen3\.[56]",
}
DENIAL = re.compile(
    r"\b(no|not|none|nobody|cannot|never|\w+n't)\b.*\b(yet|runs?|served?|works?|supported|possible)\b"
    r"|\bnot yet\b|\bunsupported\b|\brefuses?\b",
    re.IGNORECASE,
)
# What quire does not serve is named after what it does: "other mixtures and hybrids".
OTHERS = re.compile(r"\bother [^,;:.|]*")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[*_`\[]*[A-Z])|\n\s*\n|\n(?=\s*(?:[-*#|] ?|\d+\. ))")


def sentences(text: str) -> Iterator[str]:
    """Yield sentences, headings and rows of tables, in one line each."""
    for part in SENTENCE.split(text):
        lines = part.splitlines() if " | " in part else [part]
        yield from (" ".join(line.split()) for line in lines)


def denials(text: str) -> list[str]:
    """Return the sentences that deny something of a family that is served."""
    names = re.compile("|".join(NAMES.values()))
    return [
        sentence
        for sentence in sentences(text)
        if DENIAL.search(sentence) and names.search(OTHERS.sub("", sentence))
    ]


def test_every_family_has_its_name_here() -> None:
    assert NAMES.keys() == FAMILIES.keys()


def test_each_generation_with_a_short_name_is_documented() -> None:
    document = (ROOT / "engine/models/README.md").read_text(encoding="utf-8")
    repositories = " ".join(aliases().values())
    generations = set(re.findall(r"/(?:Meta-)?(\w+?-?\d(?:\.\d)?)-", repositories))
    assert {"Qwen3", "Qwen3.8", "Llama-3.2"} <= generations
    assert {name for name in generations if f"{name}-" not in document} == set()


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_backend_runs_the_families_that_are_named(model: str, tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(PUBLISHED[model].write(tmp_path / "model")))
    assert {unserved(spec, backend) for backend in KVBackend} == {None}


def test_no_document_denies_a_family_that_is_served() -> None:
    documents = git("ls-files", "--cached", "--others", "--exclude-standard", "*.md", root=ROOT)
    found = {
        name: wrong
        for name in documents.splitlines()
        if (wrong := denials((ROOT / name).read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "A Mac's GPU does not run hybrids yet: quire says so before it loads anything.",
        "`--kv-backend posix` serves it, since a GPU does\nnot run Qwen3.5 and 3.6 yet.",
        "On a Mac **Qwen3-Next** cannot be served.",
        "* Fast.\n* Qwen3.8-27B is not yet fast. Nothing else is slow.",
        "what | which\n---|---\nNot yet | other families; Qwen3 MoE; images",
        "There is no kernel for Qwen2.5's heads yet.",
        "quire refuses Llama 3 on a GPU.",
    ],
)
def test_a_sentence_that_denies_one_would_be_seen(sentence: str) -> None:
    assert len(denials(f"All is well with Qwen3.\n\n{sentence}\n\nIt runs. Not yet.")) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "Not yet | other mixtures and hybrids; images and audio; GGUF",
        "GGUF is not served. Qwen3 is.",
        "## 0.1.0, not released yet\n\n* Serves Qwen3 and Qwen3.5.",
    ],
)
def test_a_sentence_about_others_is_none(sentence: str) -> None:
    assert denials(sentence) == []
