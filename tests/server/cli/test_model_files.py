import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from server.catalogue.local_models import check_vocabulary, local_models
from server.cli import model_files
from server.cli.log import configure_log
from server.cli.model_files import (
    facts_of,
    make_plan,
    model_facts,
    read_model,
    sampling_defaults,
)
from server.cli.plan import plan_model
from server.cli.serve import serve_model
from server.cli.settings import read_settings
from server.config import MIB, Config, SettingError, engine_config
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError
from tests.draft_heads import write_companion, write_head
from tests.engine.models.hybrids import SPEC, write_hybrid
from tests.hostile_models import HOSTILE, spoil
from tests.kvcache.metal_double import Device
from tests.models import TEMPLATE, TINY, write_embedding_model, write_model, write_tokenizer
from tests.server.commands import MODEL, SETTINGS, SMALL, Run, one_sentence

GIB = 1024 * MIB


# --- the engine's settings ----------------------------------------------------------------------


def test_every_setting_of_engine_and_cache_reaches_the_engine() -> None:
    numbers = {name: 1000 + i for i, name in enumerate(("max_num_seqs", "max_model_len"))}
    settings = read_settings(
        None,
        {
            "engine": numbers | {"check_every_step": True, "threads": 3},
            "cache": {"dtype": "bfloat16", "kv_budget": "1GiB", "kv_backend": "posix"},
        },
    )
    config = engine_config(settings)
    assert (config.max_num_seqs, config.max_model_len) == (1000, 1001)
    assert config.kv_dtype == "bfloat16"
    assert (config.kv_budget_bytes, config.kv_backend) == (1024 * MIB, "posix")
    assert (config.check_every_step, config.threads) == (True, 3)
    assert engine_config(Config()).kv_dtype == "auto"


# --- plan ------------------------------------------------------------------------------------


def test_a_page_that_cannot_be_mapped_is_refused(tiny_model: Path) -> None:
    settings = read_settings(None, {"cache": {"page_size": 5000}})
    with pytest.raises(SettingError, match=r"page"):
        make_plan(settings, read_checkpoint(tiny_model))


def test_threat_21_a_mac_in_use_serves_with_a_warning_and_plan_says_what_serve_says(
    tmp_path: Path,
    small_mac: Device,
    own_log: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_model(tmp_path / "model", replace(TINY, head_dim=64))
    settings = read_settings(None, {"log": {"level": "debug"}})
    configure_log(settings.log)
    files = read_model(str(folder), settings)
    memory, facts = files.plan.memory, files.served.facts
    sizes = memory.demand.weights_bytes, memory.demand.fixed_bytes
    assert (facts.weights_bytes, facts.fixed_bytes, facts.on_gpu) == (*sizes, True)
    logged = capsys.readouterr().err.splitlines()
    assert memory.demand.usable_bytes == 8 * GIB * 2 // 3 - 1536 * MIB
    assert any("working set of the GPU" in line and "5.33 GiB" in line for line in logged)
    assert memory.warning is not None
    (warning,) = (line for line in logged if "[warning" in line)
    assert memory.warning in warning
    assert "128.00 MiB are available now" in warning
    planned = plan_model(str(folder), None)
    said = "\n".join(line.partition("] ")[2].strip() for line in logged)
    for line in planned.split("\n\n")[2].splitlines():
        assert line.strip() in said


def test_threat_21_a_mac_that_is_too_small_is_told_which_figure_does_not_fit(
    tmp_path: Path, small_mac: Device
) -> None:
    folder = write_model(tmp_path / "model", replace(TINY, head_dim=64))
    small_mac.said["recommended_working_set_bytes"] = 1900 * MIB
    with pytest.raises(SettingError, match=r"nothing is left for .* of 364.00 MiB usable.*--kv-b"):
        make_plan(read_settings(None, {}), read_checkpoint(folder))
    settings = read_settings(None, {"cache": {"kv_budget": "64MiB"}})
    assert make_plan(settings, read_checkpoint(folder)).memory.kv_budget_bytes <= 64 * MIB


def test_the_start_says_which_parts_of_a_model_are_not_served(
    tmp_path: Path, own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_hybrid(tmp_path / "model", hub=True)
    settings = read_settings(None, SMALL | {"log": {"level": "info"}})
    configure_log(settings.log)
    read_model(str(folder), settings)
    said = "Qwen3.5 is served without what its files have for drafts of tokens (1 tensor), images"
    assert said in capsys.readouterr().err


def test_the_start_says_what_drafts_and_a_named_head_comes_before_all_others(
    tmp_path: Path, own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_hybrid(tmp_path / "shelf/Qwen3.5-4B-4bit")

    def drafting(**engine: Any) -> str:
        flags = SMALL | {"log": {"level": "debug"}, "engine": SMALL["engine"] | engine}
        settings = read_settings(None, flags)
        configure_log(settings.log)
        plan = read_model(str(model), settings).plan
        assert f"drafts: {plan.draft_source} [quire]\n" in capsys.readouterr().err
        assert (plan.checkpoint.spec.draft is None) == (plan.draft_source in ("of text", "off"))
        return plan.draft_source.removeprefix("of text, and by the model's head ")

    assert drafting() == "of text"
    companion = write_companion(tmp_path / "shelf/Qwen3.5-4B-MTP-8bit", model)
    assert drafting() == f"({companion}/model.safetensors)"
    write_head(model)
    assert drafting() == f"({model}/mtp.safetensors)"
    other = write_companion(tmp_path / "other", model, seed=1)
    assert drafting(draft_model=str(other)) == f"({other}/model.safetensors)"
    assert drafting(draft_model=str(other), drafts=False) == "off"


def test_a_companion_that_does_not_fit_is_named_and_a_named_head_is_refused(
    tmp_path: Path, quire: Run, own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_hybrid(tmp_path / "shelf/Qwen3.5-4B-4bit")
    other = write_hybrid(tmp_path / "other", replace(SPEC, hidden_size=96))
    companion = write_companion(tmp_path / "shelf/Qwen3.5-4B-MTP-4bit", other)
    settings = read_settings(None, SMALL)
    configure_log(settings.log)
    assert read_model(str(model), settings).plan.draft_source == "of text"
    assert f"without what its files have for drafts of tokens ({companion}/model" in (
        capsys.readouterr().err
    )
    named = one_sentence(quire("serve", model, "--draft", companion), MODEL)
    assert named.startswith(f"quire: {companion}/model.safetensors: ")
    away = one_sentence(quire("serve", model, "--draft", "mlx-community/Head-MTP-4bit"), MODEL)
    assert "it is not on this disk: `quire pull mlx-community/Head-MTP-4bit` fetches it" in away
    alone = one_sentence(quire("serve", companion), MODEL)
    assert alone.startswith(f"quire: {companion}/config.json: this is no model, but the head that")
    assert alone.endswith("serve that model, and name this with --draft")
    vectors = write_embedding_model(tmp_path / "vectors")
    refused = one_sentence(quire("serve", vectors, "--draft", companion), MODEL)
    assert refused.startswith(
        f"quire: {vectors}: the model makes vectors of texts, and {companion}"
    )
    several = one_sentence(quire("serve", model, other, "--draft", companion), SETTINGS)
    assert several.startswith("quire: engine.draft_model (--draft) is for one model")


@pytest.mark.parametrize("name", ["mlx-community/tiny-4bit", "Tiny-4bit", "demo"])
def test_the_start_says_that_a_model_is_lm_studios(
    name: str, lm_studio: Path, own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_settings(None, SMALL)
    configure_log(settings.log)
    files = read_model(name, settings)
    line = f"{name} lies in LM Studio's folder: {lm_studio}/mlx-community/Tiny-4bit"
    assert (line in capsys.readouterr().err) is ("iny" in name)
    assert files.served.is_called(name)


def settings_of(folder: Path) -> Path:
    """A file of settings with that folder."""
    file = folder.parent / "quire.toml"
    file.write_text(f"[models]\nfolders = ['{folder}']\n")
    return file


# --- the model's files -----------------------------------------------------------------------


def test_a_tokenizer_with_more_tokens_than_the_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, TINY.vocab_size + 1)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: it has 1025 tokens.* is 1024"):
        check_vocabulary(folder, Tokenizer(folder), read_checkpoint(folder))
    write_tokenizer(folder, TINY.vocab_size)
    check_vocabulary(folder, Tokenizer(folder), read_checkpoint(folder))


@pytest.mark.parametrize(
    "kind",
    [
        "a token of id 2**31",
        "10**9 layers",
        "300,000 tensors",
        "a pipe as config.json",
        "a pipe as the weights",
        "a pipe as the tokenizer",
        "zeros as config.json",
        "a config.json of 200 MB",
    ],
)
@pytest.mark.usefixtures("impatient_reader")
def test_a_hostile_model_alone_ends_with_a_sentence_and_is_listed(
    kind: str, tiny_model: Path, tmp_path: Path, quire: Run
) -> None:
    folder = spoil(tiny_model, tmp_path / "hostile", kind)
    assert "hostile" in one_sentence(quire("serve", folder), MODEL)
    listed = quire("models", "--config", settings_of(folder))
    assert (listed.exit_code, "\nhostile " in listed.stdout) == (0, True)


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: [file.unlink() for file in f.glob("*token*")],
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        lambda f: ((f / "tokenizer.json").unlink(), (f / "tokenizer.json").mkdir()),
        HOSTILE["a tokenizer without tokens"],
        lambda f: (f / "tokenizer.json").write_text("{}"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused_at_start(
    spoiled: Callable[[Path], object], tiny_model: Path, tmp_path: Path, quire: Run
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    spoiled(folder)
    assert "tokenizer.json" in one_sentence(quire("serve", folder), MODEL)


@pytest.mark.parametrize(("task", "embeds"), [("auto", True), ("generate", False), ("embed", True)])
def test_a_setting_says_what_a_model_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, embeds: bool
) -> None:
    found: list[bool] = []

    def plan(_: object, checkpoint: Checkpoint) -> None:
        found.append(checkpoint.embeds)
        raise SettingError("seen")

    monkeypatch.setattr(model_files, "make_plan", plan)
    folder = write_embedding_model(tmp_path / "model")
    with pytest.raises(SettingError, match="seen"):
        serve_model(str(folder), read_settings(None, SMALL | {"engine": {"task": task}}))
    assert found == [embeds]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the model has no chat template: chats, messages and responses are refused"),
        ("x\n{% if %}", "has failed with a plain conversation (TemplateSyntaxError in line 2: "),
        ("{{ raise_exception('no') }}", "plain conversation (TemplateError in line 1: no): chats"),
        (TEMPLATE, ""),
    ],
)
def test_a_template_is_tried_at_start_and_what_is_wrong_with_it_is_said(
    template: str | None,
    said: str,
    tmp_path: Path,
    own_log: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, TINY.vocab_size, template=template)
    settings = read_settings(None, SMALL)
    configure_log(settings.log)
    read_model(str(folder), settings)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "[warning" in line]
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)
    assert all("/v1/completions works" in line for line in warnings)


@pytest.mark.usefixtures("folders_are_read_elsewhere")
def test_one_process_reads_the_files_and_tries_the_template_and_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **how: Any) -> Any:
        started.append(popen(*arguments, **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    read_model(str(tiny_model), read_settings(None, SMALL))
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_the_template_of_a_model_that_makes_vectors_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ChatTemplate, "try_out")
    read_model(str(write_embedding_model(tmp_path)), read_settings(None, SMALL))


# --- recommendations -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, {}),
        ({"eos_token_id": 5, "max_length": 7}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.95, "min_p": None}, {"top_p": 0.95}),
        ({"do_sample": False, "top_p": 0.95}, {"temperature": 0.0}),
        ({"repetition_penalty": 1, "min_p": 0}, {"repetition_penalty": 1, "min_p": 0}),
    ],
)
def test_the_makers_of_a_model_recommend_how_to_sample(
    config: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == defaults


def test_a_model_without_recommendations_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("top_p", -0.1),
        ("top_k", 1.5),
        ("min_p", True),
        ("repetition_penalty", [1]),
    ],
)
def test_a_recommendation_that_no_request_could_make_is_refused(
    field: str, value: Any, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError) as caught:
        sampling_defaults(tmp_path)
    assert str(caught.value).startswith(f"{file}: {field}: ")


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    checkpoint = read_checkpoint(folder)
    facts = model_facts(checkpoint)
    assert (facts.family, facts.quantization) == ("qwen3", checkpoint.dtype)
    assert facts.parameters == checkpoint.num_weights
    assert facts.size_bytes == checkpoint.stored_bytes
    assert facts.modified_at.timestamp() == 1_700_000_000
    assert len(bytes.fromhex(facts.digest)) == 32
    assert model_facts(checkpoint).digest == facts.digest
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert model_facts(checkpoint).digest != facts.digest


@pytest.mark.parametrize(
    "how", [{}, {"dtype": "bfloat16"}, {"bits": 4}, {"bits": 8}, {"bits": 4, "mode": "mxfp4"}]
)
def test_a_front_says_of_a_model_what_its_process_would(
    how: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **how)
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    (model,) = local_models([folder], hub=False)
    assert facts_of(model) == model_facts(read_checkpoint(folder))


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ({"bits": 4, "group_size": 64}, "4bit"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "MXFP4"),
    ],
)
def test_packed_weights_have_the_name_of_their_packing(
    tmp_path: Path, packing: dict[str, object], said: str
) -> None:
    folder = write_model(tmp_path / "model")
    checkpoint = read_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": packing}
    (folder / "config.json").write_text(json.dumps(config))
    assert model_facts(checkpoint).quantization == said
