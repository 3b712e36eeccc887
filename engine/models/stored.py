"""A model folder's weights as lazy MLX arrays. An array is read from its file when evaluated."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

import metal_ext
from engine.models.config import Quantization
from engine.models.expert_tensors import ExpertNames
from engine.models.safetensors_headers import CheckpointError
from engine.models.tensors import AnyMatrix, Constant, Matrix, PackingOf, Vector


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The weights of a linear layer, or an embedding."""

    weight: mx.array
    """The numbers ``[outputs, inputs]``, or packed codes if the matrix is quantized. In a stack of
    experts' matrices, the first axis of each array is the expert."""
    scales: mx.array | None = None
    """One scale for each group of codes. Likewise ``biases`` has one bias for each group."""
    biases: mx.array | None = None
    packing: Quantization | None = None
    bias: mx.array | None = None
    """The linear layer's bias ``[outputs]``. It is independent of ``biases``."""

    @property
    def quantized(self) -> dict[str, Any]:
        """Return what MLX's products must know of a quantized matrix, besides its codes."""
        assert self.packing is not None
        parts = {"scales": self.scales, "biases": self.biases, "transpose": True}
        return parts | asdict(self.packing)

    def arrays(self) -> list[mx.array]:
        parts = (self.weight, self.scales, self.biases, self.bias)
        return [array for array in parts if array is not None]

    def dequantized(self, rows: mx.array | None = None, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """Return the plain numbers of ``rows``, or of all rows. If the matrix is quantized without
        biases, the numbers have ``dtype``."""
        if rows is not None:
            return self._changed(lambda array: array[rows]).dequantized(dtype=dtype)
        weight, scales, biases, packing = self.weight, self.scales, self.biases, self.packing
        if packing is None:
            return weight
        assert scales is not None
        bits, group_size, mode = packing.bits, packing.group_size, packing.mode
        scale_dtype = dtype if biases is None else scales.dtype
        return mx.dequantize(weight, scales, biases, group_size, bits, mode, dtype=scale_dtype)

    def on_metal(self) -> "metal_ext.StoredMatrix | None":
        """Return the evaluated matrix for quire's own Metal kernels, or None if none has its
        format."""
        packing = {} if self.packing is None else asdict(self.packing)
        try:
            return metal_ext.StoredMatrix(
                self.weight, self.scales, self.biases, self.bias, **packing
            )
        except ValueError:
            return None

    def uncounted(self) -> "StoredMatrix":
        return self._changed(partial(metal_ext.uncounted, transposable=self.packing is None))

    def by_parts(self, parts: Sequence[int]) -> "StoredMatrix":
        """Sort the rows by part, as the field ``Matrix.parts`` describes."""
        if not parts:
            return self
        assert self.bias is None

        def ordered(array: mx.array) -> mx.array:
            groups = array.reshape(-1, sum(parts), array.shape[-1])
            split = mx.split(groups, list(accumulate(parts))[:-1], axis=1)
            return mx.concatenate([part.flatten(0, 1) for part in split])

        return self._changed(ordered)

    def gates_first(self) -> "StoredMatrix":
        """Sort the rows of experts' stacks, in which gate and up alternate, and their biases."""

        def ordered(array: mx.array) -> mx.array:
            return mx.concatenate([array[:, ::2], array[:, 1::2]], axis=1)

        bias = None if self.bias is None else ordered(self.bias)
        return replace(self._changed(ordered), bias=bias)

    def _changed(self, change: Callable[[mx.array], mx.array]) -> "StoredMatrix":
        scales, biases = (a if a is None else change(a) for a in (self.scales, self.biases))
        return replace(self, weight=change(self.weight), scales=scales, biases=biases)


@dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """Multiplies a layer's inputs by ``signs`` (1 or -1), and blocks of them by a normalised Walsh-
    Hadamard matrix, in float32. The weights were multiplied by the inverse, then quantized."""

    block: int
    signs: mx.array

    def apply(self, x: mx.array) -> mx.array:
        blocks = (x.astype(mx.float32) * self.signs).reshape(-1, self.block)
        return mx.hadamard_transform(blocks).reshape(x.shape).astype(x.dtype)

    def invert(self, x: mx.array) -> mx.array:
        blocks = mx.hadamard_transform(x.astype(mx.float32).reshape(-1, self.block))
        return (blocks.reshape(x.shape) * self.signs).astype(x.dtype)


class StoredWeights:
    """Weights by name. A method that returns a weight also removes it, to free memory after use."""

    def __init__(self, arrays: dict[str, mx.array], packing_of: PackingOf) -> None:
        self._arrays = arrays
        self._packing_of = packing_of
        self._rotations: dict[tuple[int, bytes], Rotation] = {}

    def matrix(self, matrix: AnyMatrix) -> StoredMatrix:
        name = matrix.name
        grouped = f"{name}.scales" in self._arrays
        stored = StoredMatrix(
            self._weight(matrix),
            self._arrays.pop(f"{name}.scales") if grouped else None,
            self._arrays.pop(f"{name}.biases", None) if grouped else None,
            self._packing_of(name) if grouped else None,
            self._arrays.pop(f"{name}.bias") if matrix.has_bias else None,
        )
        if isinstance(matrix, Matrix):
            return stored.by_parts(matrix.parts)
        return stored.gates_first() if matrix.alternates else stored

    def _weight(self, matrix: AnyMatrix) -> mx.array:
        if isinstance(matrix, Matrix):
            return self._arrays.pop(f"{matrix.name}.weight")
        weights = [self._arrays.pop(name) for name in matrix.weights]
        return mx.stack(weights) if matrix.names is ExpertNames.APART else weights[0]

    def vector(self, vector: Vector) -> mx.array:
        kept = self._arrays.pop(f"{vector.name}.weight")
        return kept + 1 if vector.less_one else kept

    def constant(self, constant: Constant) -> mx.array:
        return self._arrays.pop(constant.name).astype(mx.float32)

    def rotation(self, name: str, block: int) -> Rotation:
        """Return the rotation of a layer's inputs. Layers with equal rotations share one object.
        Raises CheckpointError."""
        signs = self._arrays.pop(f"{name}.signs").astype(mx.float32)
        if not mx.all(mx.abs(signs) == 1).item():
            raise CheckpointError(f"the tensor {name}.signs has other numbers than 1 and -1")
        key = block, np.array(signs).tobytes()
        return self._rotations.setdefault(key, Rotation(block, signs))
