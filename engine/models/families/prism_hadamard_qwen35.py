"""Bonsai 2: dense Qwen3.5 that was quantized after a rotation of its layers' inputs."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families.qwen3_5 import qwen3_5
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import ModelSpec
from engine.models.tensors import model_tensors

# The values of fields, which a config may leave out: then the first one is meant.
SERVED: dict[str, tuple[object, ...]] = {
    "schema_version": (2, 1),
    "gdn_activation_layout": ("grouped",),
}
BLOCKS = (0, 512, 1024, 2048, 4096, 8192)


def prism_hadamard_qwen35(config: ModelConfig) -> ModelSpec:
    for field, choices in SERVED.items():
        config.check_choice(field, config.values.get(field, choices[0]), choices)
    spec = replace(qwen3_5(config), family="Bonsai 2")
    return replace(spec, blocks=_blocks(config, spec))


def _blocks(config: ModelConfig, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Read the list of quantized layers."""
    modules = config.values.get("modules")
    if not isinstance(modules, list) or not modules:
        raise CheckpointError(f"{config.file}: modules is no list of the quantized layers")
    tensors = model_tensors(spec, with_head=not spec.tied_embeddings)
    inputs = {matrix.name: matrix.inputs for matrix in tensors.matrices}
    blocks: dict[str, int] = {}
    for number, module in enumerate(modules):
        field, record = f"modules[{number}]", module if isinstance(module, dict) else {}
        name = str(record.get("path"))
        if name not in inputs:
            raise CheckpointError(f"{config.file}: {field}.path is {name}; it must be a new layer")
        width = inputs.pop(name)
        fitting = [block for block in BLOCKS if width % (block or 1) == 0]
        config.check_choice(f"{field}.block", record.get("block"), fitting)
        config.check_choice(f"{field}.dtype", record.get("dtype"), ("float16",))
        blocks[name] = int(record["block"])
    return tuple(blocks.items())
