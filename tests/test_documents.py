"""No document and no comment denies what the code serves, or sends it to the CPU."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.build import unserved
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES, read_spec
from kvcache.backends.choice import KVBackend
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
    "prism_hadamard_qwen35": r"Bonsai 2",
    "gemma2": r"Gemma[ -]2\b",
    "gemma3_text": r"Gemma[ -]3\b",
    "gemma3": r"Gemma[ -]3\b",
    "gpt_oss": r"gpt-oss",
}
DENIAL = re.compile(
    r"\b(no|not|none|nobody|cannot|never|\w+n't)\b.*\b(yet|runs?|served?|works?|supported|possible)\b"
    r"|\bnot yet\b|\bunsupported\b|\brefuses?\b",
    re.IGNORECASE,
)
# What a GPU runs is not served elsewhere for want of a kernel.
SENT_AWAY = re.compile(r"--kv-backend posix|\b(serve|run)s?\b.*\bon (a|the) CPU\b", re.IGNORECASE)
COMMENT = re.compile(r"(?:^|\s)(?:#|//) ?(.*)")
ROOMS = ("server", "engine", "kvcache", "metal_ext", "configs", "docker")
CODE = ("py", "cpp", "h", "metal", "toml", "sh", "js")
READ = ("*.md", *(f"{room}/*.{suffix}" for room in ROOMS for suffix in CODE))
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
    names = re.compile("|".join(NAMES.values()), re.IGNORECASE)
    return [
        sentence
        for sentence in sentences(text)
        if (DENIAL.search(sentence) or SENT_AWAY.search(sentence))
        and names.search(OTHERS.sub("", sentence))
    ]


def prose(file: str, text: str) -> str:
    """Return a document, or the comments and docstrings of a program. Code parts comments."""
    if file.endswith(".md"):
        return text
    lines = [match[1] if (match := COMMENT.search(line)) else "" for line in text.splitlines()]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(text)) if file.endswith(".py") else ()
    strings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return "\n\n".join(["\n".join(lines), *strings])


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


def test_nothing_denies_a_family_that_is_served() -> None:
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", *READ, root=ROOT)
    found: dict[str, list[str]] = {}
    for name in listed.splitlines():
        if "vendor" not in name:
            wrong = denials(prose(name, (ROOT / name).read_text(encoding="utf-8")))
            found |= {name: wrong} if wrong else {}
    assert found == {}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("a.py", "x = 1  # a GPU does not run hybrids yet\n"),
        ("a.py", "# Qwen3-Next is not\n# served here.\nx = 1\n"),
        ("a.py", 'def f():\n    """Serves Qwen3.6 on the CPU."""\n'),
        ("a.cpp", "int x;  // Qwen2.5 cannot run\n"),
        ("a.metal", "// There is no kernel for Qwen3.5 yet.\nkernel void f() {}\n"),
        ("a.toml", "# Hybrids need --kv-backend posix.\nx = 1\n"),
    ],
)
def test_a_comment_that_denies_one_would_be_seen(file: str, code: str) -> None:
    assert len(denials(prose(file, code))) == 1


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
        "On a Mac, serve hybrids with `--kv-backend posix`.",
        "Qwen3.8 runs on the CPU of a Mac.",
        "Hybrids are not possible on a GPU.",
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
