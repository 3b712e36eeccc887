"""A model's operations on a GPU, with MLX's kernels and quire's own (metal_ext/kernels/metal)."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import mlx.core as mx

import metal_ext
from engine.models.forward import (
    conv_by_taps,
    gated_delta,
    qk_transforms,
    softmaxes,
    split_gate,
)
from engine.models.spec import Attention, Experts, Gate, GatedDeltaNet, ModelSpec
from engine.models.stored import Rotation, StoredMatrix, StoredWeights
from engine.models.tensors import (
    AnyMatrix,
    AttentionTensors,
    DeltaTensors,
    DenseTensors,
    Matrix,
    MixtureTensors,
    ModelTensors,
    Product,
    Vector,
)
from kvcache.views import KVViews

# If there are at least this many pairs of a token and an expert, sort them by expert, so that an
# expert's tokens are multiplied together. mlx-lm does the same (models/switch_layers.py).
LEAST_SORTED_PAIRS = 64
# The most rows that quire's own kernels multiply, as MLX's tiles of rows are faster for more. With
# more rows, a row's bits may depend on the others.
FEW_ROWS = 8
# The most pairs of a token and an expert that quire's own kernels sort (kMaxPairs), and how many
# for each expert make MLX multiply tiles of them, which is faster then (its quantized.cpp).
MOST_PAIRS, LEAST_PAIRS_PER_EXPERT = 1024, 4
# Less than 65504, because bfloat16 rounds the numbers of which K and V are made.
LARGEST_FLOAT16 = 60000

GateFunction = Callable[[mx.array, mx.array], mx.array]
"""A function that computes ``silu(gates) * up``, or what another gate makes of them."""


def has_few_pairs(spec: Experts, tokens: int) -> bool:
    """Return True if quire's own kernels compute a mixture for this number of tokens."""
    return tokens * spec.chosen < min(MOST_PAIRS, LEAST_PAIRS_PER_EXPERT * spec.experts)


def route(logits: mx.array, spec: Experts) -> tuple[mx.array, mx.array]:
    """Return the chosen experts and the experts' weights, both ``[T, chosen]``, best first. Of
    experts with equal weights, the one with the lower number is chosen."""
    shares = mx.softmax(logits, axis=-1, precise=True)
    experts = mx.argsort(-shares, axis=-1)[:, : spec.chosen]
    weights = mx.take_along_axis(shares, experts, axis=-1)
    if spec.normalised:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def mix(
    x: mx.array,
    experts: mx.array,
    weights: mx.array,
    gate_up: list[StoredMatrix],
    down: StoredMatrix,
    gate: GateFunction,
) -> mx.array:
    """Return the weighted sums ``[T, hidden]`` of the experts' outputs. ``experts`` and ``weights``
    are ``[T, chosen]``. ``gate_up`` has separate stacks of gate and up, or one fused stack."""
    rows, chosen = experts.shape
    numbers, order = experts.flatten(), None
    pairs = mx.arange(rows * chosen) // chosen
    if ordered := numbers.size >= LEAST_SORTED_PAIRS:
        order = mx.argsort(numbers)
        numbers, pairs = numbers[order], pairs[order]
    given = x[pairs]
    both = [_multiply_chosen(given, matrix, numbers, ordered=ordered) for matrix in gate_up]
    gates, up = both if len(both) == 2 else mx.split(both[0], 2, axis=-1)
    outputs = _multiply_chosen(gate(gates, up), down, numbers, ordered=ordered)
    if order is not None:
        outputs = outputs[mx.argsort(order)]
    parts = outputs.reshape(rows, chosen, -1) * weights[..., None]
    return parts.sum(axis=-2).astype(outputs.dtype)


def _multiply_chosen(
    x: mx.array, stack: StoredMatrix, experts: mx.array, *, ordered: bool
) -> mx.array:
    """Multiply each row of x by its expert's matrix. ``ordered`` is True if ``experts`` ascend."""
    product = _product_of_chosen(x[:, None], stack, experts, ordered=ordered)[:, 0]
    return product if stack.bias is None else product + stack.bias[experts]


def _product_of_chosen(
    rows: mx.array, stack: StoredMatrix, experts: mx.array, *, ordered: bool
) -> mx.array:
    if stack.packing is None:
        transposed = stack.weight.swapaxes(-1, -2)
        return mx.gather_mm(rows, transposed, rhs_indices=experts, sorted_indices=ordered)
    return mx.gather_qmm(
        rows, stack.weight, rhs_indices=experts, sorted_indices=ordered, **stack.quantized
    )


class MlxOps:
    """Implements Ops (forward.py) with MLX, on weights that are packed as in the files."""

    rotated_dtype = mx.float16
    """The dtype of activations, for models with rotated inputs."""

    def __init__(self, spec: ModelSpec, tensors: ModelTensors, stored: StoredWeights) -> None:
        """Take all weights out of ``stored``, as lazy arrays that are read from files later."""
        self._eps = spec.norm_eps
        self._embedding_scale = spec.embedding_scale
        self._tensors = tensors
        self._layers = list(zip(spec.all_layers, tensors.all_layers, strict=True))
        self._matrices = {matrix.name: stored.matrix(matrix) for matrix in tensors.matrices}
        blocks = tensors.blocks.items()
        self._rotations = {name: stored.rotation(name, block) for name, block in blocks if block}
        self._vectors = {vector.name: stored.vector(vector) for vector in tensors.vectors}
        if spec.norm_offset:
            offset = spec.norm_offset
            self._vectors = {name: each + offset for name, each in self._vectors.items()}
        if tensors.blocks:  # norms in float32, as in the files, would make all activations so
            for name, each in self._vectors.items():
                self._vectors[name] = each.astype(self.rotated_dtype)
        self._vectors |= {each.name: stored.constant(each) for each in tensors.constants}
        for norm in (norm for layer in tensors.all_layers for norm in _head_norms(layer.mixer)):
            # The Metal kernels need weights of norms over heads in float32.
            self._vectors[norm.name] = self._vectors[norm.name].astype(mx.float32)
        self._places = spec.places
        self._transforms = qk_transforms(spec, tensors, self._vectors)
        self.softmaxes = softmaxes(spec, tensors, self._vectors)
        self._deltas: list[metal_ext.GatedDelta] = []
        for layer, at in self._layers:
            if isinstance(layer.mixer, GatedDeltaNet) and isinstance(at.mixer, DeltaTensors):
                name = at.mixer.conv.name
                self._vectors[name] = conv_by_taps(layer.mixer, self._vectors[name])
                delta = gated_delta(layer.mixer, spec.norm_eps, at.mixer, self._vectors)
                self._deltas.append(delta)
        self._on_metal: dict[str, metal_ext.StoredMatrix] = {}
        self._mixtures: dict[str, metal_ext.Mixture | None] = {}
        self.weights = [array for matrix in self._matrices.values() for array in matrix.arrays()]
        self.weights += self._vectors.values()
        self.weights += [each.signs for each in dict.fromkeys(self._rotations.values())]

    def stop_counting(self) -> None:
        """Use the evaluated matrices under aliases, so that MLX does not count weights towards the
        size of a command buffer. Each product with experts would count the matrices of all experts,
        and a step of a mixture would be 42 command buffers instead of 7. Activations, K and V
        still count: they limit the memory that a command buffer holds, and how long it runs."""
        if metal_ext.HAS_METAL:
            kept = ((name, matrix.on_metal()) for name, matrix in self._matrices.items())
            self._on_metal = {name: matrix for name, matrix in kept if matrix is not None}
            for spec, tensors in ((layer.mlp, at.mlp) for layer, at in self._layers):
                if isinstance(spec, Experts) and isinstance(tensors, MixtureTensors):
                    self._mixtures[tensors.down.name] = self._mixture_on_metal(spec, tensors)
        self._matrices = {name: matrix.uncounted() for name, matrix in self._matrices.items()}

    def _mixture_on_metal(
        self, spec: Experts, tensors: MixtureTensors
    ) -> "metal_ext.Mixture | None":
        """Return the experts for quire's own kernels, with the shared expert if its format is that
        of the others, or None if no kernel has their format."""
        dense = tensors.shared
        parts = () if dense is None else (*dense.gate_up, dense.down)
        stacks = self._all_on_metal((*tensors.gate_up, tensors.down))
        for shared in (self._all_on_metal(parts), []) if stacks else ():
            with suppress(ValueError):
                return metal_ext.Mixture(
                    stacks[:-1], stacks[-1], shared,
                    chosen=spec.chosen, normalised=spec.normalised, kind=spec.gate.value,
                )  # fmt: skip
        return None

    def _all_on_metal(self, matrices: Sequence[AnyMatrix]) -> "list[metal_ext.StoredMatrix]":
        own = [self._on_metal[each.name] for each in matrices if each.name in self._on_metal]
        return own if len(own) == len(matrices) else []

    def embed(self, token_ids: mx.array) -> mx.array:
        rotation = self._rotations.get(self._tensors.embedding.name)
        rows = self._rows(token_ids, self._tensors.embedding)
        rows = rows if rotation is None else rotation.invert(rows)
        return rows if self._embedding_scale == 1 else self._embedding_scale * rows

    def _rows(self, token_ids: mx.array, matrix: Matrix) -> mx.array:
        embedding = self._matrices[matrix.name]
        return embedding.dequantized(token_ids, self._vectors[self._tensors.norm.name].dtype)

    def project(self, number: int, x: mx.array, views: KVViews) -> tuple[mx.array, mx.array | None]:
        (layer, tensors), place = self._layers[number], self._places[number]
        mixer, gate = layer.mixer, None
        assert isinstance(mixer, Attention)
        assert isinstance(tensors.mixer, AttentionTensors)
        normed = self._normed(x, tensors.mixer_norm)
        queries, keys, values = (
            each.reshape(len(x), -1, mixer.head_dim)
            for each in self._multiply_each(normed, tensors.mixer.queries_keys_values)
        )
        if mixer.output_gate:
            queries, gate = split_gate(queries)
        return views.append(place, queries, keys, values, self._transforms[place]), gate

    def recur(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        (layer, tensors), place = self._layers[number], self._places[number]
        assert isinstance(layer.mixer, GatedDeltaNet)
        assert isinstance(tensors.mixer, DeltaTensors)
        normed = self._normed(x, tensors.mixer_norm)
        projected = self._multiply_each(normed, tensors.mixer.inputs)
        if len(projected) == 2:
            firsts = layer.mixer.widths[::2]
            halves = zip(projected, firsts, strict=True)
            projected = [half for both, first in halves for half in mx.split(both, [first], axis=1)]
        qkv, z, b, a = projected
        a, b = a.astype(qkv.dtype), b.astype(qkv.dtype)  # of matrices that may be plain
        return views.recur(place, qkv, z, a, b, self._deltas[place])

    def add_mixed(self, number: int, x: mx.array, mixed: mx.array) -> mx.array:
        _, tensors = self._layers[number]
        mixed, product = mixed.reshape(x.shape[0], -1), (tensors.mixer.output,)
        return self._add_product(x, mixed, product, tensors.mixer_post_norm)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        layer, tensors = self._layers[number]
        normed = self._normed(x, tensors.mlp_norm)
        if isinstance(layer.mlp, Experts):
            assert isinstance(tensors.mlp, MixtureTensors)
            return self._add_mixture(x, normed, layer.mlp, tensors.mlp)
        assert isinstance(tensors.mlp, DenseTensors)
        gated = self._gated_product(normed, tensors.mlp.gate_up, layer.mlp.gate)
        return self._add_product(x, gated, (tensors.mlp.down,), tensors.mlp_post_norm)

    def require_float16_suffices(self) -> None:
        """Raise RuntimeError if a key or a value could exceed float16. The weights decide, not a
        trial, because a rare token may have the largest key."""
        if (bound := self.kv_bound()) > LARGEST_FLOAT16:
            raise RuntimeError(
                f"the weights allow keys and values up to {bound:.0f}, and float16 has numbers up "
                "to 65504, so that answers could be wrong: use --kv-dtype auto or bfloat16"
            )

    def kv_bound(self) -> float:
        """Return a number that no key and no value of any prompt exceeds, but by rounding."""
        bounds: list[mx.array] = []
        for layer, at in self._layers:
            if isinstance(layer.mixer, Attention) and isinstance(at.mixer, AttentionTensors):
                _, keys, values = at.mixer.queries_keys_values
                bounds.append(self._bound(at.mixer_norm, values))
                bound = self._bound(at.mixer_norm, keys)
                if (norm := at.mixer.key_norm) is not None:
                    bound = layer.mixer.head_dim**0.5 * mx.abs(self._vectors[norm.name]).max()
                # RoPE rotates pairs of a key's numbers: one may get the length of both.
                bounds.append(bound * 2**0.5 * max(1.0, layer.mixer.rope.magnitude))
        return float(mx.stack(bounds).max())

    def _bound(self, norm: Vector, matrix: Matrix) -> mx.array:
        """Return a bound of the products of a normed x with a matrix. Before the norm's weights, x
        has the length sqrt(hidden size) at most. So a product is at most that times the length of
        the row of weights (Cauchy and Schwarz)."""
        weights, stored = self._vectors[norm.name].astype(mx.float32), self._matrices[matrix.name]
        # Looking all rows up copies them: arithmetic by element does not read aliases.
        rows = stored.dequantized(mx.arange(len(stored.weight))).astype(mx.float32) * weights
        bounds = mx.sqrt(weights.size * mx.square(rows).sum(axis=1))
        return (bounds if stored.bias is None else bounds + mx.abs(stored.bias)).max()

    def norm(self, x: mx.array) -> mx.array:
        return self._normed(x, self._tensors.norm)

    def head(self, states: mx.array) -> mx.array:
        return self._multiply(states, self._tensors.head or self._tensors.embedding)

    def join(self, token_ids: mx.array, before: mx.array) -> mx.array:
        draft = self._tensors.draft
        assert draft is not None
        embedded = self._normed(self.embed(token_ids), draft.embedding_norm)
        states = self._normed(before, draft.hidden_norm)
        return self._multiply(mx.concatenate([embedded, states], axis=1), draft.join)

    def draft_norm(self, x: mx.array) -> mx.array:
        assert self._tensors.draft is not None
        return self._normed(x, self._tensors.draft.norm)

    def _add_mixture(
        self, residual: mx.array, x: mx.array, spec: Experts, tensors: MixtureTensors
    ) -> mx.array:
        logits, *shared_gate = self._multiply_each(x, tensors.router)
        own = self._own_mixture(x, spec, tensors)
        if tensors.shared is not None and not (own and own.has_shared):
            gated = self._gated_product(x, tensors.shared.gate_up, Gate.SILU)
            shared = self._multiply(gated, tensors.shared.down)
            residual = residual + mx.sigmoid(shared_gate.pop()) * shared
        if own:
            return metal_ext.mixture(x, residual, logits, own, *shared_gate)
        experts, weights = route(logits, spec)
        *gate_up, down = (self._matrices[each.name] for each in (*tensors.gate_up, tensors.down))
        return residual + mix(x, experts, weights, gate_up, down, GATED[spec.gate])

    def _own_mixture(
        self, x: mx.array, spec: Experts, tensors: MixtureTensors
    ) -> "metal_ext.Mixture | None":
        """Return the experts for quire's own kernels, or None where MLX has to multiply."""
        own = self._mixtures.get(tensors.down.name)
        return own if own and has_few_pairs(spec, len(x)) and _takes(own, x) else None

    def _normed(self, x: mx.array, norm: Vector) -> mx.array:
        return mx.fast.rms_norm(x, self._vectors[norm.name], self._eps)

    def _add_product(
        self, x: mx.array, inputs: mx.array, product: Product, norm: Vector | None
    ) -> mx.array:
        """Return x plus a layer's output, behind its norm if it has one. Such sums may exceed
        float16, where they become its largest number, as in mlx-lm (models/gemma3_text.py)."""
        ((inputs, product),) = self._rotated(inputs, product)
        if norm is None:
            return self._products(inputs, product, residual=x)[0]
        output = self._normed(self._products(inputs, product)[0], norm)
        if x.dtype != mx.float16:
            return x + output
        largest = mx.finfo(mx.float16).max
        wide = x.astype(mx.float32) + output.astype(mx.float32)
        return mx.clip(wide, -largest, largest).astype(mx.float16)

    def _multiply(self, x: mx.array, matrix: Matrix) -> mx.array:
        return self._multiply_each(x, (matrix,))[0]

    def _multiply_each(self, x: mx.array, product: Product) -> list[mx.array]:
        """Multiply x by each matrix."""
        return self._multiply_rotated(self._rotated(x, product), product)

    def _multiply_rotated(
        self, rotated: list[tuple[mx.array, Product]], product: Product
    ) -> list[mx.array]:
        products: dict[Matrix, mx.array] = {}
        for x, matrices in rotated:
            products |= zip(matrices, self._products(x, matrices), strict=True)
        return [products[matrix] for matrix in product]

    def _gated_product(self, x: mx.array, gate_up: Product, kind: Gate) -> mx.array:
        """Return what the gate of an MLP makes of x."""
        rotated = self._rotated(x, gate_up)
        own = self._own_matrices(*rotated[0])
        formats = {(self._matrices[each.name].packing, each.has_bias) for each in gate_up}
        if len(own) == len(gate_up) and len(formats) == 1 and not gate_up[0].has_bias:
            return metal_ext.multiply_gated(rotated[0][0], *own, kind=kind.value)
        return GATED[kind](*self._multiply_rotated(rotated, gate_up))

    def _rotated(self, x: mx.array, product: Product) -> list[tuple[mx.array, Product]]:
        """Return x as the matrices multiply it, with those that share one rotated x."""
        if not self._rotations:
            return [(x, product)]
        by_rotation: dict[Rotation | None, list[Matrix]] = {}
        for matrix in product:
            by_rotation.setdefault(self._rotations.get(matrix.name), []).append(matrix)
        return [
            (x if rotation is None else rotation.apply(x), tuple(matrices))
            for rotation, matrices in by_rotation.items()
        ]

    def _products(
        self, x: mx.array, product: Product, residual: mx.array | None = None
    ) -> list[mx.array]:
        """Multiply x by each matrix, and add the residual to the only product."""
        if own := self._own_matrices(x, product):
            return metal_ext.multiply(x, own, residual)
        products = [self._product(x, matrix) for matrix in product]
        return products if residual is None else [residual + products[0]]

    def _own_matrices(self, x: mx.array, product: Product) -> "list[metal_ext.StoredMatrix]":
        """Return the matrices for quire's own kernels, or none where MLX has to multiply."""
        own = [self._on_metal.get(matrix.name) for matrix in product]
        fit = [each for each in own if each is not None and _takes(each, x)]
        return fit if len(x) <= FEW_ROWS and len(fit) == len(own) else []

    def _product(self, x: mx.array, matrix: Matrix) -> mx.array:
        return _multiply(x, self._matrices[matrix.name])


def _takes(own: "metal_ext.StoredMatrix | metal_ext.Mixture", x: mx.array) -> bool:
    return own.dtype is None or own.dtype == x.dtype


def _head_norms(mixer: AttentionTensors | DeltaTensors) -> list[Vector]:
    if isinstance(mixer, DeltaTensors):
        return [mixer.norm]
    return [norm for norm in (mixer.query_norm, mixer.key_norm) if norm is not None]


def _gated(kind: Gate, gate: mx.array, up: mx.array) -> mx.array:
    """Return what an MLP makes of gate and up-projection (metal_ext.gated_mlp), in float32."""
    g, u = gate.astype(mx.float32), up.astype(mx.float32)
    if kind is Gate.CLAMPED_SILU:
        g, u = mx.minimum(g, 7.0), mx.clip(u, -7.0, 7.0) + 1
    curved = g + 0.044715 * g**3 if kind is Gate.GELU else g
    steep = {Gate.SILU: 1.0, Gate.GELU: (8 / math.pi) ** 0.5, Gate.CLAMPED_SILU: 1.702}[kind]
    return (g * mx.sigmoid(steep * curved) * u).astype(gate.dtype)


# For a GPU, MLX compiles each to one command. On Linux, it would do so with g++ at run time.
_compiled = partial(mx.compile, shapeless=True) if metal_ext.HAS_METAL else partial
GATED: dict[Gate, GateFunction] = {kind: _compiled(partial(_gated, kind)) for kind in Gate}


def _multiply(x: mx.array, matrix: StoredMatrix) -> mx.array:
    if matrix.packing is None:
        weight = matrix.weight.T
        return x @ weight if matrix.bias is None else mx.addmm(matrix.bias, x, weight)
    product = mx.quantized_matmul(x, matrix.weight, **matrix.quantized)
    return product if matrix.bias is None else product + matrix.bias
