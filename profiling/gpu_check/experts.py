"""Time of one fused-MoE layer against the number of distinct experts its batch activates.

    t(d) = t0 + c_e * d

c_e, by least squares, is what one more expert costs in one layer: it calibrates the simulator's
step cost. The layer is vLLM's fused_experts where vLLM is installed, else torch's grouped matrix
products over the same bf16 weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from profiling.gpu_check.clock import Sample, Timer, interleave
from profiling.gpu_check.shapes import Model

BATCH = 64  # tokens of a decode step
ROUNDS = 9
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def counts_of_experts(model: Model, batch: int = BATCH) -> list[int]:
    """Numbers of distinct experts to try: top_k to what the batch can reach, about evenly."""
    most = min(model.experts, batch * model.top_k)
    return sorted({int(d) for d in np.linspace(model.top_k, most, 9)})


def ids_with(model: Model, distinct: int, batch: int, seed: int) -> Tensor:
    """int32 [batch, top_k]: distinct ids in a row, exactly `distinct` in all, evenly used.

    Raises:
        ValueError: fewer than top_k, or more than the batch or the model can have.
    """
    if not model.top_k <= distinct <= min(model.experts, batch * model.top_k):
        raise ValueError(f"distinct: {distinct} experts are impossible for {model.name}")
    rng = np.random.default_rng(seed)
    used = rng.permutation(model.experts)[:distinct]
    # Walking round the used experts, a row holds top_k neighbours: no id twice.
    at = np.arange(batch * model.top_k).reshape(batch, model.top_k) % distinct
    return torch.from_numpy(used[at].astype(np.int32))


def vllm_layer() -> Layer | None:
    """The fused layer of vLLM, or None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")

    def layer(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = module.fused_experts(x, w1, w2, weights, ids)
        return out

    return layer


def grouped_layer(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """SwiGLU experts: x [B, H], w1 [E, 2 I, H], w2 [E, H, I], weights and ids [B, K] -> [B, H]."""
    experts, top_k = w1.shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    ends = torch.searchsorted(
        ids.flatten()[order].contiguous(),
        torch.arange(experts, device=ids.device, dtype=ids.dtype),
        right=True,
    ).to(torch.int32)
    rows = x[order // top_k]
    gate, up = torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    down = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    down *= weights.flatten()[order].to(down.dtype)[:, None]
    return torch.zeros_like(x).index_add_(0, order // top_k, down)


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """One model's layer: time by distinct experts, and the line through it.

    Attributes:
        base_us: t0. expert_us: c_e. expert_bytes: bf16 weights of one expert.
    """

    model: str
    layer: str
    batch: int
    samples: dict[int, Sample]
    base_us: float
    expert_us: float
    expert_bytes: int

    @property
    def gb_per_s(self) -> float | None:
        """Bandwidth at which one more expert is read; None where more experts cost nothing."""
        return self.expert_bytes / self.expert_us / 1000 if self.expert_us > 0 else None

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "model": self.model, "layer": self.layer, "batch": self.batch,
            "us": {str(d): s.as_dict() for d, s in self.samples.items()},
            "base_us": self.base_us, "expert_us": self.expert_us,
            "expert_bytes": self.expert_bytes,
            "expert_gb_per_s": self.gb_per_s,
        }  # fmt: skip


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (value at 0, slope)."""
    x, y = np.array(points, float).T
    slope, base = np.polyfit(x, y, 1)
    return float(base), float(slope)


def measure(
    timer: Timer,
    model: Model,
    layer: Layer,
    layer_name: str,
    device: torch.device,
    batch: int = BATCH,
) -> ExpertCost:
    """Times one layer of `model` on random bf16 weights."""
    g = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return out.normal_(0, 0.02, generator=g)

    w1 = draw(model.experts, 2 * model.width, model.hidden)
    w2 = draw(model.experts, model.hidden, model.width)
    x = draw(batch, model.hidden)
    weights = torch.full((batch, model.top_k), 1 / model.top_k, device=device)
    prepared = {}
    for distinct in counts_of_experts(model, batch):
        ids = [ids_with(model, distinct, batch, seed).to(device) for seed in range(4)]
        calls = [lambda i=i: layer(x, w1, w2, weights, i) for i in ids]
        prepared[str(distinct)] = timer.prepare(calls)
    samples = {int(d): s for d, s in interleave(prepared, ROUNDS).items()}
    base, slope = line([(d, s.median) for d, s in samples.items()])
    return ExpertCost(model.name, layer_name, batch, samples, base, slope, model.expert_bytes)
