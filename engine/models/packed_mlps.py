"""The MLPs of a model over packed weights, on a CPU."""

from dataclasses import dataclass

import mlx.core as mx

import metal_ext
from engine.models.spec import Experts


@dataclass(frozen=True, slots=True)
class PackedDense:
    """The same matrices for every token."""

    gate_up: metal_ext.PackedLinear
    down: metal_ext.PackedLinear

    def added(
        self, x: mx.array, norm: mx.array, eps: float, workers: metal_ext.CpuWorkers
    ) -> mx.array:
        """Return x plus the MLP of its norm."""
        return metal_ext.gated_mlp(x, norm, eps, self.gate_up, self.down, workers)


@dataclass(frozen=True, slots=True)
class PackedMixture:
    """A mixture of experts."""

    spec: Experts
    router: metal_ext.PackedLinear
    """And the gate of the shared expert behind it."""
    gate_up: metal_ext.PackedExperts
    down: metal_ext.PackedExperts
    shared: PackedDense | None

    def added(
        self, x: mx.array, norm: mx.array, eps: float, workers: metal_ext.CpuWorkers
    ) -> mx.array:
        """Return x plus the mixture of its norm."""
        return metal_ext.mixture_mlp(
            x,
            norm,
            eps,
            self.router,
            self.gate_up,
            self.down,
            self.spec.chosen,
            self.spec.normalised,
            None if self.shared is None else (self.shared.gate_up, self.shared.down),
            workers,
        )


PackedMlp = PackedDense | PackedMixture
