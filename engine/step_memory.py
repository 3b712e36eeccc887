"""How much memory serving takes beside weights and cache: bounds, before any step has run."""

from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.spec import GatedDeltaNet, Mixer, ModelSpec
from engine.step.sampler import SCORED_ROWS_AT_ONCE
from kvcache.layout import KVShape
from kvcache.memory_budget import MemoryDemand
from kvcache.substrates import Substrate

FLOAT32_BYTES = 4
# Copies of the hidden state and of the logits that live at once during a step: a bound, not a
# measurement.
HIDDEN_COPIES = 6
LOGIT_COPIES = 5
# Positions of a row that decode kernels sum at a time, as in kernels/metal/arguments.h and
# kernels/cpu/kernels.h; and of rows that are short, which a GPU cuts smaller.
SPLIT_TOKENS = 256
SHORT_SPLIT_TOKENS, SHORT_ROW_TOKENS = 128, 2048
# Layers whose K and V may lie gathered at once, where they lie in no one array: a bound.
GATHERED_LAYERS = 2


def memory_demand(
    spec: ModelSpec,
    config: EngineConfig,
    machine: MachineMemory,
    shape: KVShape,
    substrate: Substrate,
    itemsize: int,
) -> MemoryDemand:
    """Return what is needed beside the weights.

    machine: what the processor that computes may use. shape: of K and V. itemsize: bytes of a
    number that the model computes with.
    """
    activations = activation_bytes(spec, config, itemsize)
    attention = attention_scratch_bytes(spec, config, shape, substrate)
    return MemoryDemand(
        machine_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        headroom_bytes=machine.headroom_bytes(config.headroom_bytes),
        weights_bytes=0,
        activation_bytes=activations + attention,
        mlx_cache_bytes=config.mlx_cache_bytes,
        grammar_bytes=config.grammar_bytes,
        on_gpu=machine.on_gpu,
    )


def activation_bytes(spec: ModelSpec, config: EngineConfig, itemsize: int) -> int:
    """Return an upper bound of what one step computes with; attention's own aside.

    itemsize: bytes of a number of the hidden state; logits are widened to float32. Where an
    operation takes a whole MLP, it computes with less: with 256 rows at a time.
    """
    # Of the MLP and of attention, in the layer that needs most.
    layer = max(
        its.mlp.numbers_per_token(spec.hidden_size) + _mixer_numbers(its.mixer)
        for its in spec.layers
    )
    per_token = HIDDEN_COPIES * spec.hidden_size + layer
    per_row = LOGIT_COPIES * spec.vocab_size
    rows = max(config.max_num_seqs, SCORED_ROWS_AT_ONCE)
    hidden = config.max_num_batched_tokens * per_token * itemsize
    return hidden + rows * per_row * FLOAT32_BYTES


def _mixer_numbers(mixer: Mixer) -> int:
    """Return how many numbers a token has between a layer's projections: a bound."""
    if isinstance(mixer, GatedDeltaNet):
        return 2 * (mixer.conv_width + 2 * mixer.values_width)
    queries = 2 * mixer.heads if mixer.output_gate else mixer.heads
    return 4 * (queries + 2 * mixer.kv_heads) * mixer.head_dim


def attention_scratch_bytes(
    spec: ModelSpec, config: EngineConfig, shape: KVShape, substrate: Substrate
) -> int:
    """Return an upper bound of what attention computes with: a partial sum for every split of every
    sequence that decodes; and where pages are no one array, a copy of a prompt's past."""
    longest = config.max_model_len or spec.max_position_embeddings
    short = min(longest, SHORT_ROW_TOKENS)
    of_row = max(-(-longest // SPLIT_TOKENS), -(-short // SHORT_SPLIT_TOKENS))
    splits = config.max_num_seqs * of_row
    # A sum, and the two numbers that it is combined with others by.
    partial = max(its.heads * (its.head_dim + 2) for its in spec.attentions) * FLOAT32_BYTES
    gathered = GATHERED_LAYERS * 2 * longest * max(its.row_bytes for its in shape.specs)
    return splits * partial + (gathered if substrate is Substrate.PAGED else 0)
