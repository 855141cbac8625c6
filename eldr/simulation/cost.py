"""Step cost, prefill cost and KV memory of a model on hardware, in the units of a trace.

t = fixed + (expert bytes of the distinct experts + dense bytes + KV bytes) / bandwidth

A trace rarely has the model's own geometry. Its *share* of distinct experts is applied to the
model: one cell (layer, expert) of an L x E trace stands for L' * E' / (L * E) cells of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from eldr.geometry import Geometry
from eldr.routing.cost import StepCost
from eldr.simulation import models
from eldr.simulation.models import ASSUMED, Figure, HardwareSpec, ModelSpec
from eldr.simulation.prefill import PrefillConfig

MEMORY_USE = Figure(0.9, "share of a GPU's memory that the engine uses: vLLM's default")
TRANSFER_FIXED = Figure(1e-3, ASSUMED + ", seconds to register and start the read of a KV")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on one decode worker of `tensor` GPUs.

    Attributes:
        model, hardware: see `models`.
        tensor: tensor-parallel GPUs of a worker.
        expert: expert-parallel ranks; 1, or `tensor`. With 1 every GPU reads its slice of each
            expert, otherwise each expert sits on one rank and the slowest rank counts.
    """

    model: ModelSpec
    hardware: HardwareSpec
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.expert not in (1, self.tensor):
            raise ValueError(
                f"deployment: needs tensor >= 1 and expert in (1, tensor), got {self.tensor} "
                f"and {self.expert}"
            )

    @property
    def bytes_per_second(self) -> float:
        """Read bandwidth of the whole worker."""
        return self.hardware.bandwidth.value * self.hardware.efficiency.value * self.tensor

    @property
    def kv_copies(self) -> int:
        """GPUs of a worker that hold the same KV."""
        return self.tensor if self.model.kv_replicated else 1

    def step_cost(self, trace: Geometry) -> StepCost:
        """Seconds of a step, with D in cells of the trace."""
        spec, hard, rate = self.model, self.hardware, self.bytes_per_second
        layer = hard.layer_fixed.value + (hard.tensor_parallel.value if self.tensor > 1 else 0.0)
        scale = spec.layers * spec.experts / trace.cells
        return StepCost(
            base=hard.step_fixed.value + layer * spec.depth + spec.dense_bytes / rate,
            # One rank alone reads its experts with one GPU's bandwidth.
            expert=spec.expert_bytes * scale * self.expert / rate,
            kv=spec.kv_token * self.kv_copies / rate,
            request=spec.kv_window * self.kv_copies / rate,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit beside the weights.

        Raises:
            ValueError: the weights alone do not fit.
        """
        room = MEMORY_USE.value * self.hardware.memory.value * self.tensor - self.model.weight_bytes
        token = self.model.kv_token * self.kv_copies
        if room < token:
            raise ValueError(
                f"deployment: {self.model.weight_bytes / 1e9:.0f} GB of weights do not fit "
                f"{self.tensor} x {self.hardware.memory.value / 1e9:.0f} GB"
            )
        return int(room / token)

    @staticmethod
    def instant() -> PrefillConfig:
        """No prefill pool: requests reach the decode workers as they arrive."""
        return PrefillConfig()

    def prefill(self, workers: int, cached: float = 0.0) -> PrefillConfig:
        """Prefill workers of the same shape, compute-bound: 2 FLOP per active parameter."""
        hard = self.hardware
        rate = hard.flops.value * hard.flops_efficiency.value * self.tensor
        return PrefillConfig(
            workers=workers,
            fixed=hard.step_fixed.value + hard.layer_fixed.value * self.model.depth,
            token=2 * self.model.active / rate,
            cached=cached,
            transfer_fixed=TRANSFER_FIXED.value,
            transfer_token=self.model.kv_token / (hard.link.value * self.tensor),
        )


def deployment(model: str, hardware: str, tensor: int = 1, expert: int = 1) -> Deployment:
    """A deployment by names.

    Raises:
        ValueError: unknown model or hardware, or impossible parallelism.
    """
    return Deployment(models.model(model), models.hardware(hardware), tensor, expert)


def study_cost(trace: Geometry) -> StepCost:
    """The assumed step of the policy study: 3 ms + 0.15 ms per distinct expert, mean over layers.

    At a batch of 30 the experts are about 70 % of it, as for Qwen3-30B-A3B on an H200 by the model
    above. Nothing else is counted, so that only the policy's two levers remain: experts and load.
    """
    return StepCost(base=3e-3, expert=0.15e-3 / trace.layers)
