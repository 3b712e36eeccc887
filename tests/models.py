"""Checkpoints of random weights and any dimensions, Qwen3 unless a test wants another family."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED_TOKENS = ("<think>", "</think>")
BYTE_TOKENS = 256
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# ChatML with Qwen3's thoughts; {calls} is how calls are written.
TEMPLATE_FORM = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- '{calls-begin}<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
        {%- set call = call.function %}
{calls}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
HERMES_CALLS = """\
        {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- (call.arguments | tojson) + '}\\n</tool_call>' }}"""
XML_CALLS = """\
        {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
        {%- for name, value in call.arguments | items %}
            {%- set text = value if value is string else value | tojson %}
            {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}"""


def chat_template(calls: str, begin: str) -> str:
    """begin: the tag that tells a reader of the template how calls are written."""
    return TEMPLATE_FORM.replace("{calls}", calls).replace("{calls-begin}", begin)


TEMPLATE = chat_template(HERMES_CALLS, "<tool_call>")
XML_TEMPLATE = chat_template(XML_CALLS, "<tool_call><function=")


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions in config.json."""

    num_hidden_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 32
    intermediate_size: int = 128
    vocab_size: int = 1024
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = True


TINY = ModelSpec()
SMALL = ModelSpec(
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=256,
    vocab_size=512,
)
# Huggingface's Qwen/Qwen3-4B.
QWEN3_4B = ModelSpec(
    num_hidden_layers=36,
    hidden_size=2560,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151936,
)
# Qwen/Qwen3-8B.
QWEN3_8B = replace(QWEN3_4B, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)


def write_model(
    folder: Path,
    spec: ModelSpec = TINY,
    *,
    dtype: str = "float32",
    bits: int | None = None,
    group_size: int = 32,
    mode: str = "affine",
    layers: Mapping[str, dict[str, Any] | bool] = MappingProxyType({}),
    seed: int = 0,
    gain: float = 1.0,
    head: str | None = None,
    **changes: Any,
) -> Path:
    """Write a whole model folder: config, weights, tokenizer, template. bits, group_size, mode:
    pack the weights as MLX does. layers: the packing of layers by the end of their names; False:
    none. gain: of the layers' matrices; with 3 an answer hardly says a token twice. head: the name
    of a file with a random draft head, without its ending. changes: fields of config.json, as
    mlx-lm knows them; a field that is ... is left out."""
    from tests.reference import classes_of

    folder.mkdir(parents=True, exist_ok=True)
    config = _config(spec, dtype) | changes
    config = {field: value for field, value in config.items() if value is not ...}
    mx.random.seed(seed)
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config))
    if gain != 1.0:
        model.update(tree_map_with_path(partial(_amplified, gain), model.parameters()))
    model.set_dtype(DTYPES[dtype])
    if bits is not None:
        import mlx.nn as nn

        own: dict[str, dict[str, Any] | bool] = {}

        def packs(name: str, module: nn.Module) -> dict[str, Any] | bool:
            its = next((how for end, how in layers.items() if name.endswith(end)), True)
            if its is not True and hasattr(module, "to_quantized"):
                own[name] = its
            return its if hasattr(module, "to_quantized") else False

        nn.quantize(model, group_size, bits, mode=mode, class_predicate=packs)
        config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode} | own
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, spec.vocab_size)
    if head is not None:
        from tests.draft_heads import write_head

        write_head(folder, f"{head}.safetensors", seed=seed)
    return folder


def write_embedding_model(
    folder: Path, spec: ModelSpec = TINY, *, modules: bool = True, bare: bool = True, **how: Any
) -> Path:
    """Write a model as Qwen3-Embedding is saved: no head, names without ``model.``, sentence-
    transformers' list of modules, and a tokenizer that ends every text with <|endoftext|>. modules,
    bare: whether it has that list and those names. how: as for write_model."""
    write_model(folder, spec, **how)
    file = str(folder / "model.safetensors")
    stored: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    weights = {name: array for name, array in stored.items() if "lm_head" not in name}
    if bare:
        weights = {name.removeprefix("model."): array for name, array in weights.items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    if modules:
        write_modules(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, tokenizer.token_to_id(end))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_modules(
    folder: Path,
    kinds: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    pooling: dict[str, Any] | None = None,
) -> None:
    """Write modules.json, and the settings of the second module."""
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = folder / "1_Pooling" / "config.json"
    settings.parent.mkdir(exist_ok=True)
    default = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    settings.write_text(json.dumps({"include_prompt": True} | (pooling or default)))


def write_config(folder: Path, spec: ModelSpec, **changes: Any) -> Path:
    """Write a model folder without weights. changes: fields of config.json; one that is ... is left
    out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(spec, "bfloat16") | changes
    kept = {field: value for field, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def write_tokenizer(
    folder: Path,
    vocab_size: int,
    *,
    template: str | None = TEMPLATE,
    special: tuple[str, ...] = SPECIAL_TOKENS,
    plain: tuple[str, ...] = PLAIN_ADDED_TOKENS,
) -> None:
    """Write a byte-level tokenizer, one token per byte. Tokens beyond those are words of their own
    number, so that each token of a random model is text. special, plain: tokens of more than a
    byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *special, *plain]
    words += [f"w{n}" for n in range(len(words), vocab_size)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    eos = [vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def write_sentencepiece_tokenizer(folder: Path, *, leading_space: bool = True) -> None:
    """Write a tokenizer like Llama 2's: signs for spaces, and byte tokens for unknown letters.
    leading_space: whether every text gets one, which decoding takes back; Gemma's get none."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("▁▁", "▁▁"), ("e", "é")]
    letters = [*'▁theabcxyz{}":,.é你ши', "▁the!"]
    words = ["<unk>", *bytes_, *letters, *map("".join, merges), *SPECIAL_TOKENS]
    words += PLAIN_ADDED_TOKENS
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    scheme = "first" if leading_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if leading_space else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN_ADDED_TOKENS])
    write_tokenizer(folder, len(words))
    (folder / "generation_config.json").unlink()  # it has other ids
    tokenizer.save(str(folder / "tokenizer.json"))


def _amplified(gain: float, name: str, array: mx.array) -> mx.array:
    return array * gain if ".layers." in name and array.ndim > 1 else array


def _config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    return asdict(spec) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "torch_dtype": dtype,
    }
