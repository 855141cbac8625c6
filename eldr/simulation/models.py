"""What a decode step of the known models reads, and what the known hardware gives.

Every figure carries its source, or the mark `assumed`. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ASSUMED = "assumed"


class Figure(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A MoE model as a decode step sees it.

    Attributes:
        layers, experts, top_k: routing geometry (MoE layers only).
        depth: all transformer layers.
        expert_bytes: weights of one expert of one layer.
        dense_bytes: everything else that a step reads once.
        kv_token: KV bytes per token of context, of the layers that attend to all of it.
        kv_window: KV bytes per request of the sliding-window layers, once the window is full.
        active: parameters that a prompt token multiplies (prefill work is 2 FLOP each).
        source: of the dimensions.
        kv_replicated: every tensor-parallel GPU holds and reads all of the KV (MLA).
    """

    layers: int
    experts: int
    top_k: int
    depth: int
    expert_bytes: float
    dense_bytes: float
    kv_token: float
    kv_window: float
    active: float
    source: str
    kv_replicated: bool = False

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.layers * self.experts * self.expert_bytes + self.dense_bytes


def _attention(hidden: int, heads: int, kv_heads: int, width: int) -> float:
    """Parameters of query, key, value and output projections of one layer."""
    return float(2 * hidden * heads * width + 2 * hidden * kv_heads * width)


def _swiglu(hidden: int, width: int) -> float:
    """Parameters of a gated feed-forward block: gate, up and down projections."""
    return float(3 * hidden * width)


def _qwen3_30b() -> ModelSpec:
    expert = _swiglu(2048, 768)
    dense = 48 * (_attention(2048, 32, 4, 128) + 2048 * 128) + 151_936 * 2048
    return ModelSpec(
        48, 128, 8, 48, 2 * expert, 2 * dense, 2.0 * 2 * 4 * 128 * 48, 0.0,
        dense + 48 * 8 * expert, "config.json of Qwen/Qwen3-30B-A3B, bf16",
    )  # fmt: skip


def _gpt_oss_120b() -> ModelSpec:
    expert = _swiglu(2880, 2880)
    # MXFP4: 4-bit values and one 8-bit scale per 32 of them; biases in bf16.
    expert_bytes = expert * 17 / 32 + 2 * (2 * 2880 + 2880)
    dense = 36 * (_attention(2880, 64, 8, 64) + 2880 * 128) + 201_088 * 2880
    row = 2.0 * 2 * 8 * 64  # key and value of one token and layer
    return ModelSpec(
        36, 128, 4, 36, expert_bytes, 2 * dense, 18 * row, 18 * row * 128,
        dense + 36 * 4 * expert, "config.json of openai/gpt-oss-120b, mxfp4 experts, bf16 else",
    )  # fmt: skip


def _gemma_4_26b() -> ModelSpec:
    expert = _swiglu(2816, 704)
    sliding = _attention(2816, 16, 8, 256)
    whole = 2816.0 * (2 * 16 * 512 + 2 * 512)  # keys and values of global layers are shared
    dense = 25 * sliding + 5 * whole + 30 * (_swiglu(2816, 2112) + 2816 * 128) + 262_144 * 2816
    return ModelSpec(
        30, 128, 8, 30, 2 * expert, 2 * dense, 2.0 * 5 * 2 * 512 * 2, 2.0 * 2 * 25 * 8 * 256 * 1024,
        dense + 30 * 8 * expert,
        "config.json of google/gemma-4-26b-a4b, bf16; expert width 704 and 16 heads are assumed",
    )  # fmt: skip


def _qwen3_235b() -> ModelSpec:
    expert = _swiglu(4096, 1536)
    dense = 94 * (_attention(4096, 64, 4, 128) + 4096 * 128) + 151_936 * 4096
    embedding = 151_936 * 4096  # the output projection stays bf16
    return ModelSpec(
        94, 128, 8, 94, expert, dense + embedding, 2.0 * 2 * 4 * 128 * 94, 0.0,
        dense + 94 * 8 * expert, "config.json of Qwen/Qwen3-235B-A22B-FP8, fp8 weights, bf16 KV",
    )  # fmt: skip


def _deepseek_v3() -> ModelSpec:
    expert = _swiglu(7168, 2048)
    latent = 7168.0 * 1536 + 1536 * 24_576 + 7168 * 576 + 512 * 32_768 + 16_384 * 7168
    dense = 61 * latent + 58 * expert + 3 * _swiglu(7168, 18_432) + 129_280 * 7168
    return ModelSpec(
        58, 256, 8, 61, expert, dense + 129_280 * 7168, 576.0 * 2 * 61, 0.0,
        dense + 58 * 8 * expert, "DeepSeek-V3 report (arXiv 2412.19437), fp8 weights, bf16 KV",
        kv_replicated=True,
    )  # fmt: skip


def _tiny() -> ModelSpec:
    expert = _swiglu(128, 32)
    dense = 4 * (_attention(128, 4, 2, 32) + 128 * 64) + 4096 * 128
    return ModelSpec(
        4, 64, 4, 4, 2 * expert, 2 * dense, 2.0 * 2 * 2 * 32 * 4, 0.0, dense + 4 * 4 * expert,
        "the bundled checkpoint, bf16",
    )  # fmt: skip


MODELS: dict[str, ModelSpec] = {
    "qwen3-30b-a3b": _qwen3_30b(),
    "gpt-oss-120b": _gpt_oss_120b(),
    "gemma-4-26b-a4b": _gemma_4_26b(),
    "qwen3-235b-a22b": _qwen3_235b(),
    "deepseek-v3": _deepseek_v3(),
    "tiny": _tiny(),
}


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One GPU (or CPU socket) and its link.

    Attributes:
        bandwidth: memory bytes per second.
        efficiency: share of it that a decode step reaches.
        memory: bytes.
        flops: dense FLOP per second at the weights' precision.
        flops_efficiency: share of it that prefill reaches.
        link: bytes per second of the KV transfer.
        step_fixed: seconds of a step outside the layers (scheduling, sampling).
        layer_fixed: seconds per layer that do not depend on what is read.
        tensor_parallel: further seconds per layer with more than one GPU (all-reduce).
    """

    bandwidth: Figure
    efficiency: Figure
    memory: Figure
    flops: Figure
    flops_efficiency: Figure
    link: Figure
    step_fixed: Figure
    layer_fixed: Figure
    tensor_parallel: Figure


def _gpu(bandwidth: float, memory: float, flops: float, sheet: str) -> HardwareSpec:
    return HardwareSpec(
        bandwidth=Figure(bandwidth, sheet),
        efficiency=Figure(0.75, ASSUMED),
        memory=Figure(memory, sheet),
        flops=Figure(flops, sheet),
        flops_efficiency=Figure(0.5, ASSUMED),
        link=Figure(50e9, "400 Gb/s per GPU, as in arXiv 2607.00466"),
        step_fixed=Figure(0.5e-3, ASSUMED),
        layer_fixed=Figure(40e-6, ASSUMED + ", between 25 and 60 us"),
        tensor_parallel=Figure(15e-6, ASSUMED),
    )


HARDWARE: dict[str, HardwareSpec] = {
    "h200": _gpu(4.8e12, 141e9, 989e12, "NVIDIA H200 data sheet"),
    "mi300x": _gpu(5.3e12, 192e9, 1307e12, "AMD MI300X data sheet"),
    "b200": _gpu(8.0e12, 180e9, 2250e12, "NVIDIA B200 data sheet"),
    "cpu": HardwareSpec(
        bandwidth=Figure(20e9, ASSUMED + ", one core's copy bandwidth"),
        efficiency=Figure(0.75, ASSUMED),
        memory=Figure(8e9, ASSUMED),
        flops=Figure(50e9, ASSUMED),
        flops_efficiency=Figure(0.5, ASSUMED),
        link=Figure(2e9, ASSUMED),
        step_fixed=Figure(5e-3, ASSUMED),
        layer_fixed=Figure(200e-6, ASSUMED),
        tensor_parallel=Figure(0.0, ASSUMED),
    ),
}


def model(name: str) -> ModelSpec:
    """A model by name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


def hardware(name: str) -> HardwareSpec:
    """Hardware by name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[name]
