"""A model's small files, checked as they would be served. Files that were not read before are
checked in a process of its own."""

from pathlib import Path

from engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    promised_checkpoint,
    read_checkpoint,
)
from engine.planning.memory import read_shape
from server.text.tokenizer import Tokenizer, TokenizerError


def folder_problem(
    path: str, embeds: bool | None, promised_bytes: int | None, tokenizer: bool
) -> str | None:
    """Return what is wrong with a folder, a sentence; None where nothing is. promised_bytes: of its
    weights, where some are not here yet. tokenizer: whether that is here."""
    folder = Path(path)
    try:
        checkpoint = checkpoint_in(folder, embeds, promised_bytes)
        if tokenizer:
            check_vocabulary(folder, Tokenizer(folder), checkpoint)
    except (CheckpointError, TokenizerError) as error:
        return str(error)
    return None


def shape_problem(path: str) -> str | None:
    """Return why the shape of the model in a folder cannot be read; None where it can."""
    try:
        read_shape(Path(path))
    except CheckpointError as error:
        return str(error)
    return None


def checkpoint_in(folder: Path, embeds: bool | None, promised_bytes: int | None) -> Checkpoint:
    """Read a folder's checkpoint, or what it is going to be. Raises CheckpointError."""
    if promised_bytes is None:
        return read_checkpoint(folder, embeds=embeds)
    return promised_checkpoint(folder, promised_bytes, embeds=embeds)


def template_facts(path: str) -> tuple[str, bool, bool, str]:
    """Return what is wrong with a folder's tokenizer, or nothing; whether its chat template writes
    calls, and thoughts; and the template."""
    try:
        template = Tokenizer(Path(path)).template
    except TokenizerError as error:
        return str(error), False, False, ""
    return "", template.tool_format is not None, template.knows_thoughts, template.text


def check_vocabulary(folder: Path, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise TokenizerError for a tokenizer that has more tokens than the weights."""
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}: it has {tokenizer.vocab_size} tokens, but config.json's "
            f"vocab_size is {checkpoint.vocab_size}"
        )
