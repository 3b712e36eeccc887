"""Finds and checks the head that drafts tokens (multi-token prediction). A checkpoint's own files
have it, or a file beside them that the index leaves out, or a companion checkpoint."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from engine.models.config import ModelConfig, Quantization
from engine.models.expert_tensors import find_expert_names, refuse_unread_experts
from engine.models.safetensors_headers import (
    CheckpointError,
    Header,
    Tensor,
    read_floats,
    read_header,
    tensors_of_files,
    weight_files,
)
from engine.models.spec import ModelSpec
from engine.models.tensors import DRAFT_NAMINGS, Naming, check_tensors, model_tensors

PREFIXES = tuple(naming.prefix for naming in DRAFT_NAMINGS)
Item = TypeVar("Item")
UNREAD = tuple((prefix, "drafts of tokens") for prefix in PREFIXES)
"""As ModelSpec.unread, for a head that is not served."""
# Every head of the known kind has this tensor.
MARK = "pre_fc_norm_hidden.weight"
# Where files lie, in a checkpoint's folder, that an index leaves out.
BELOW = ("*/mtp.safetensors", "mtp/*.safetensors")
BESIDE = ("*.safetensors", *BELOW)
# The mean of a hybrid's norms of queries and keys is near 0.75 in files with ``weight - 1``, and
# near 1.75 in files with the weight. Other norms do not tell, and files' metadata has been wrong
# (youssofal/MTPLX, mtp_sidecar_norms_are_delta).
QK_NORMS = (".q_norm.weight", ".k_norm.weight")
LEAST_WHOLE_MEAN = 1.25


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A checked draft head. The names of all its tensors begin with the prefix of ``naming``."""

    tensors: Mapping[str, Tensor]
    packings: Mapping[str, Quantization]
    naming: Naming
    files: tuple[Path, ...] = ()
    """The files that hold the tensors, unless they are the checkpoint's own."""


def names_head(names: Collection[str]) -> bool:
    """Return True if a checkpoint with tensors of these names has a draft head of its own."""
    return _prefix_in(names, PREFIXES) is not None


def own_head(
    config: ModelConfig, spec: ModelSpec, tensors: Mapping[str, Tensor], model: Naming
) -> StoredHead | None:
    """Return the head among a checkpoint's own ``tensors``, if there is one. The files store its
    norms as those of the model, which has the naming ``model``. Raises CheckpointError."""
    prefix = _prefix_in(tensors, PREFIXES)
    if prefix is None:
        return None
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return _checked(config, spec, own, Naming(prefix, zero_centred=model.zero_centred))


def head_beside(config: ModelConfig, spec: ModelSpec) -> StoredHead | None:
    """Return the head that a file beside those has, if there is one. Raises CheckpointError."""
    path = config.file.parent
    own = set(weight_files(path))
    files = [file for place in BESIDE for file in sorted(path.glob(place)) if file not in own]
    heads = (_head_in([read_header(file)], config, spec) for file in files)
    return next((head for head in heads if head is not None), None)


def companion_head(folder: Path, spec: ModelSpec) -> StoredHead:
    """Return the head in a companion checkpoint's folder. Raises CheckpointError."""
    config = ModelConfig(folder)
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    head = _head_in(headers, config, spec)
    if head is None:
        raise CheckpointError(f"{folder}: no file holds the tensor {MARK} of a draft head")
    return head


def _head_in(headers: Sequence[Header], config: ModelConfig, spec: ModelSpec) -> StoredHead | None:
    """Return the head in files other than the model's, if there is one. Raises CheckpointError."""
    names = {name for header in headers for name in header.entries}
    prefix = _prefix_in(names, (*PREFIXES, ""))
    if prefix is None:
        return None
    headers = [each for each in headers if any(name.startswith(prefix) for name in each.entries)]
    tensors = named_as_drafts(tensors_of_files(headers, prefix))
    head = _checked(config, spec, tensors, Naming(PREFIXES[0]))
    norms = [
        read_floats(header, name)
        for header in headers
        for name in header.entries
        if name.startswith(prefix) and name.endswith(QK_NORMS)
    ]
    less_one = bool(spec.recurrences) and bool(np.concatenate(norms).mean() < LEAST_WHOLE_MEAN)
    files = tuple(header.file for header in headers)
    return replace(head, naming=replace(head.naming, zero_centred=less_one), files=files)


def named_as_drafts(tensors: Mapping[str, Item]) -> dict[str, Item]:
    """Return the tensors of a head's files by names with the first known prefix. Other tensors of
    these files get names that nobody reads."""
    prefix = _prefix_in(tensors, (*PREFIXES, ""))
    assert prefix is not None
    return {PREFIXES[0] + name.removeprefix(prefix): each for name, each in tensors.items()}


def _prefix_in(names: Collection[str], prefixes: Sequence[str]) -> str | None:
    return next((prefix for prefix in prefixes if f"{prefix}{MARK}" in names), None)


def _checked(
    config: ModelConfig, spec: ModelSpec, tensors: Mapping[str, Tensor], naming: Naming
) -> StoredHead:
    config = copy(config)  # without a quantization of the model, shapes tell that of a head
    config.values = {"quantization": {"bits": 4, "group_size": 64}} | config.values
    naming = replace(naming, experts=find_expert_names(tensors))
    refuse_unread_experts(config.file.parent, naming.experts, tensors)
    draft = model_tensors(spec.with_draft_head(), draft=naming, with_head=False).draft
    assert draft is not None
    packings = check_tensors(config, spec.family, draft.shapes, tensors)
    return StoredHead(tensors, packings, naming)
