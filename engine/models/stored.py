"""A folder's weights as MLX reads them: each is read from its file when it is evaluated."""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.models.config import Quantization
from engine.models.tensors import Matrix, PackingOf, Vector


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The weights of a linear layer, or an embedding."""

    weight: mx.array
    """``[outputs, inputs]``, or words of codes where it is grouped."""
    scales: mx.array | None = None
    """Of each group, as are ``biases``."""
    biases: mx.array | None = None
    packing: Quantization | None = None
    """How it is grouped."""
    bias: mx.array | None = None
    """``[outputs]``, of the layer."""

    def arrays(self) -> list[mx.array]:
        """Return all that it consists of."""
        parts = (self.weight, self.scales, self.biases, self.bias)
        return [array for array in parts if array is not None]

    def dequantized(self) -> "StoredMatrix":
        """Return the same in plain numbers, of the dtype of the scales."""
        if self.packing is None:
            return self
        assert self.scales is not None
        bits, group_size = self.packing.bits, self.packing.group_size
        plain = mx.dequantize(self.weight, self.scales, self.biases, group_size, bits)
        return StoredMatrix(plain, bias=self.bias)

    def widened(self) -> "StoredMatrix":
        """Return the same with its floats as float32."""

        def wide(array: mx.array | None) -> mx.array | None:
            return None if array is None else array.astype(mx.float32)

        weight = self.weight if self.packing is not None else self.weight.astype(mx.float32)
        return replace(
            self,
            weight=weight,
            scales=wide(self.scales),
            biases=wide(self.biases),
            bias=wide(self.bias),
        )


class StoredWeights:
    """Weights by name. What is taken is no longer there, so that it lives as long as its taker."""

    def __init__(
        self,
        arrays: dict[str, mx.array],
        packing_of: PackingOf,
        *,
        dequantizes: bool = False,
        widens: bool = False,
    ) -> None:
        """arrays: not evaluated yet. dequantizes: whether groups are unpacked. widens: whether
        floats become float32."""
        self._arrays = arrays
        self._packing_of = packing_of
        self._dequantizes = dequantizes
        self._widens = widens

    def matrix(self, matrix: Matrix) -> StoredMatrix:
        """Take a matrix."""
        name = matrix.name
        grouped = f"{name}.scales" in self._arrays
        found = StoredMatrix(
            self._arrays.pop(f"{name}.weight"),
            self._arrays.pop(f"{name}.scales") if grouped else None,
            self._arrays.pop(f"{name}.biases") if grouped else None,
            self._packing_of(name) if grouped else None,
            self._arrays.pop(f"{name}.bias") if matrix.has_bias else None,
        )
        if self._dequantizes:
            found = found.dequantized()
        return found.widened() if self._widens else found

    def vector(self, vector: Vector) -> mx.array:
        """Take a norm's weights."""
        found = self._arrays.pop(f"{vector.name}.weight")
        return found.astype(mx.float32) if self._widens else found
