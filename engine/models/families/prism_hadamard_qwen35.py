"""Bonsai 2: dense Qwen3.5 that was quantized after a rotation of its layers' inputs."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families.qwen3_5 import qwen3_5
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import ModelSpec
from engine.models.tensors import model_tensors

# The value of tensor_namespace in each schema_version.
NAMESPACES = {1: "mlx-lm-text", 2: "mlx-vlm-qwen3_5"}
BLOCKS = (0, 512, 1024, 2048, 4096, 8192)


def prism_hadamard_qwen35(config: ModelConfig) -> ModelSpec:
    version = config.values.get("schema_version", 2)
    config.check_choice("schema_version", version, NAMESPACES)
    served = {"tensor_namespace": NAMESPACES[version], "gdn_activation_layout": "grouped"}
    for field, value in served.items():
        config.check_choice(field, config.values.get(field, value), (value,))
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
        name, block = str(record.get("path")), record.get("block")
        if name not in inputs or name in blocks:
            raise CheckpointError(f"{config.file}: {field}.path is {name}; it must be a new layer")
        config.check_choice(f"{field}.block", block, BLOCKS)
        config.check_choice(f"{field}.dtype", record.get("dtype"), ("float16",))
        config.check_multiple(f"the inputs of {name}", inputs[name], f"{field}.block", block or 1)
        blocks[name] = record["block"]
    return tuple(blocks.items())
