"""What the Triton kernels are launched with, at the shapes of real models, without a GPU.

The launchers themselves run on meta tensors while launches are recorded, so a recipe cannot drift
from what is launched. The kernel report compiles these offline; nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eldr.kernels.accumulate import accumulate_hits_triton
from eldr.kernels.assign import LeastLoad, LocalityBand, MarginalCost, assign_triton, coefficients
from eldr.kernels.decide import decide_triton
from eldr.kernels.device_kernel import Launch, record_launches
from eldr.kernels.gather import gather_signatures_triton
from eldr.kernels.score import score_triton


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's routing and its block size."""

    name: str
    layers: int
    experts: int
    top_k: int
    block_size: int
    histogram: torch.dtype = torch.uint8


SHAPES = (
    Shape("qwen3-30b-a3b", 48, 128, 8, 16),
    Shape("gpt-oss-120b", 36, 128, 4, 16),
    Shape("gemma-4-26b-a4b", 30, 128, 8, 16),
    Shape("qwen3-235b-a22b", 94, 128, 8, 16),
    Shape("deepseek-v3", 58, 256, 8, 64),
    Shape("e60-k6", 26, 60, 6, 16),
    Shape("e512-k16-b256", 48, 512, 16, 256, torch.uint16),
)
_TOKENS, _BLOCKS, _PER_REQUEST = 8192, 100_000, 128


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A launch with the name it has in reports."""

    name: str
    launch: Launch


def recipes() -> list[Recipe]:
    """Every kernel, at every shape that changes its code."""
    found = [Recipe(f"accumulate {s.name}", launch) for s in SHAPES for launch in _accumulate(s)]
    for shape in (SHAPES[0], SHAPES[4], SHAPES[6]):
        found += _named(f"gather {shape.name}", _gather(shape, 16))
        found += _named(f"decide R=1 W=16 {shape.name}", _decide(shape, 1, 16))
    found += _named("score R=4 W=16", _score(SHAPES[0], 4, 16))
    found += _named("score R=64 W=256", _score(SHAPES[0], 64, 256))
    for rule in (LeastLoad(), LocalityBand(0.1), MarginalCost(1.0, 1.0, 1.0, 1.0)):
        for workers in (16, 1024):
            name = f"assign {type(rule).__name__} W={workers}"
            found += _named(name, _assign(rule, workers))
    return found


def _named(name: str, launches: list[Launch]) -> Iterator[Recipe]:
    for launch in launches:
        yield Recipe(f"{name}: {launch.kernel.__name__}", launch)


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _histograms(shape: Shape) -> Tensor:
    return _meta(shape.histogram, _BLOCKS, shape.layers, shape.experts)


def _accumulate(shape: Shape) -> list[Launch]:
    ids = _meta(torch.int32, _TOKENS, shape.layers, shape.top_k)
    slots = _meta(torch.int64, _TOKENS)
    with record_launches() as launches:
        accumulate_hits_triton(ids, slots, shape.block_size, _histograms(shape))
    return launches


def _blocks(requests: int) -> tuple[Tensor, Tensor]:
    ids = _meta(torch.int32, requests * _PER_REQUEST)
    return ids, _meta(torch.int32, requests + 1)


def _gather(shape: Shape, requests: int) -> list[Launch]:
    counts = _meta(torch.int32, requests, shape.layers, shape.experts)
    with record_launches() as launches:
        gather_signatures_triton(_histograms(shape), *_blocks(requests), counts)
    return launches


def _vectors(shape: Shape, workers: int) -> tuple[Tensor, Tensor]:
    cells = shape.layers * shape.experts
    return _meta(torch.float32, workers, cells), _meta(torch.float32, cells)


def _score(shape: Shape, requests: int, workers: int) -> list[Launch]:
    vectors, squares = _vectors(shape, workers)
    counts = _meta(torch.int32, requests, shape.layers, shape.experts)
    scores = _meta(torch.float32, requests, workers)
    with record_launches() as launches:
        score_triton(counts, vectors, None, squares, None, 0.0, scores)
    return launches


def _decide(shape: Shape, requests: int, workers: int) -> list[Launch]:
    vectors, squares = _vectors(shape, workers)
    scores = _meta(torch.float32, requests, workers)
    with record_launches() as launches:
        decide_triton(
            _histograms(shape), *_blocks(requests), vectors, None, squares, None, 0.0,
            0, [], None, None, scores, None, None, None, None,
        )  # fmt: skip
    return launches


def _assign(rule: LeastLoad | LocalityBand | MarginalCost, workers: int) -> list[Launch]:
    requests, costs = 64, isinstance(rule, MarginalCost)
    with record_launches() as launches:
        assign_triton(
            _meta(torch.float32, requests, workers), rule.code, coefficients(rule),
            _meta(torch.int32, requests), _meta(torch.float32, requests) if costs else None,
            _meta(torch.int32, workers), _meta(torch.float32, 2, workers) if costs else None,
            _meta(torch.int32, requests),
        )  # fmt: skip
    return launches
