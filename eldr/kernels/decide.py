"""decide: gather + score (+ assign) in one call, without writing the signatures out.

    counts = gather_signatures(...); scores = score(counts, ...); chosen = assign(scores, ...)

The intermediate counts [R, L * E] stay on chip: a program sums its columns of a request's block
rows and multiplies them with the same columns of the W vectors at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eldr.kernels import backend, checks, workspace
from eldr.kernels.arrays import take_over, takes_arrays
from eldr.kernels.assign import Rule, assign_ref, assign_triton, check_assignment, coefficients
from eldr.kernels.device_kernel import device_kernel
from eldr.kernels.gather import (
    check_blocks,
    gather_settings,
    gather_signatures_ref,
    gather_signatures_triton,
    sum_rows,
)
from eldr.kernels.library import declare
from eldr.kernels.score import (
    TILE_REQUESTS,
    Scorer,
    check_scoring,
    dot_workers,
    finish_scores,
    operands,
    partials,
    score_ref,
    score_triton,
)

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What `decide` needs to assign as well; fields as the arguments of `assign`."""

    rule: Rule
    load: Tensor
    cost: Tensor
    state: Tensor | None = None
    request_kv: Tensor | None = None

    def __post_init__(self) -> None:
        take_over(self, "load", "cost", "state", "request_kv")


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Results of `decide`: scores float32 [R, W]; chosen int32 [R], None without assignment."""

    scores: Tensor
    chosen: Tensor | None


def decide_ref(
    histograms: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    vectors: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    rule: int,
    coefficients: list[float],
    cost: Tensor | None,
    request_kv: Tensor | None,
    scores: Tensor,
    counts: Tensor | None,
    load: Tensor | None,
    state: Tensor | None,
    chosen: Tensor | None,
) -> None:
    """The three references one after the other; arguments as the op's."""
    if counts is None:
        shape = (offsets.numel() - 1, *histograms.shape[1:])
        counts = torch.empty(shape, dtype=torch.int32, device=histograms.device)
    gather_signatures_ref(histograms, block_ids, offsets, counts)
    score_ref(counts, vectors, prior, squares, tokens, shrinkage, scores)
    if cost is not None and load is not None and chosen is not None:
        assign_ref(scores, rule, coefficients, cost, request_kv, load, state, chosen)


@device_kernel("num_ids")
def decide_kernel(  # type: ignore[no-untyped-def]
    hist_ptr, ids_ptr, offsets_ptr, vectors_ptr, squares_ptr, counts_ptr, dots_ptr, norms_ptr,
    num_ids, num_blocks, hist_stride, cells, workers,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
    WORKERS: tl.constexpr, NORM: tl.constexpr, COUNTS: tl.constexpr,
) -> None:  # fmt: skip
    """dots[r,c,w] = <x, vectors[w, chunk]>, x = sum over the request's blocks of hist[b, chunk].

    Grid (requests, chunks of COLUMNS cells). `gather_kernel` and `score_rows_kernel` in one: the
    counts stay on chip unless they are wanted. Each program writes dots[r, c, :], norms[r, c] and,
    if COUNTS, counts[r, chunk].
    """
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = c * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_rows(
        hist_ptr, ids_ptr, offsets_ptr, r, d, num_ids, num_blocks, hist_stride, cells,
        COLUMNS, ROWS, CAP, STAGES,
    )  # fmt: skip
    if COUNTS:
        tl.store(counts_ptr + r * cells + d, total, mask=d < cells)
    x = total.to(tl.float32)
    part = r * tl.num_programs(1) + c
    dot_workers(
        vectors_ptr, squares_ptr, dots_ptr, norms_ptr, x, d, part, cells, workers, WORKERS, NORM
    )


# More workers than this, and enough requests for tiles: writing the counts out costs less than
# reading the vectors once per request.
_FUSED_WORKERS = 64


def decide_triton(
    histograms: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    vectors: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    rule: int,
    coefficients: list[float],
    cost: Tensor | None,
    request_kv: Tensor | None,
    scores: Tensor,
    counts: Tensor | None,
    load: Tensor | None,
    state: Tensor | None,
    chosen: Tensor | None,
) -> None:
    """Launches the kernels of a decision; arguments as the op's, already checked."""
    requests, workers = scores.shape
    if workers > _FUSED_WORKERS and requests >= TILE_REQUESTS:
        if counts is None:
            shape = (requests, *histograms.shape[1:])
            counts = torch.empty(shape, dtype=torch.int32, device=histograms.device)
        gather_signatures_triton(histograms, block_ids, offsets, counts)
        score_triton(counts, vectors, prior, squares, tokens, shrinkage, scores)
    else:
        dots, norms = _partial_sums(histograms, block_ids, offsets, vectors, squares, counts)
        finish_scores(dots, norms, prior, squares, tokens, shrinkage, scores)
    if cost is not None and load is not None and chosen is not None:
        assign_triton(scores, rule, coefficients, cost, request_kv, load, state, chosen)


def _partial_sums(
    histograms: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    vectors: Tensor,
    squares: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    requests, (workers, cells) = offsets.numel() - 1, vectors.shape
    dots, norms = partials(histograms.device, requests, cells, workers)
    constants, options = gather_settings(histograms)
    decide_kernel[(requests, dots.shape[1])](
        histograms, block_ids, offsets, vectors, vectors if squares is None else squares,
        block_ids if counts is None else counts, dots, norms, block_ids.numel(),
        histograms.shape[0], histograms.stride(0), cells, workers, WORKERS=8,
        NORM=squares is not None, COUNTS=counts is not None, **constants, **options,
    )  # fmt: skip
    return dots, norms


def decide_cuda(*arguments: object) -> int:
    """The CUDA C++ kernel; arguments as the op's. Returns `backend.UNSUPPORTED` if it has none."""
    histograms, offsets, vectors = arguments[0], arguments[2], arguments[3]
    assert isinstance(histograms, Tensor), "the op's first argument"
    assert isinstance(offsets, Tensor), "the op's third argument"
    assert isinstance(vectors, Tensor), "the op's fourth argument"
    workers, cells = vectors.shape
    size = int(torch.ops.eldr_cuda.decide_workspace(offsets.numel() - 1, cells, workers))
    if size == 0:
        return backend.UNSUPPORTED
    scratch = workspace.zeroed(histograms.device, size)
    return int(torch.ops.eldr_cuda.decide(*arguments, scratch))


_op = declare(
    "decide(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor vectors, Tensor? prior, "
    "Tensor? squares, Tensor? tokens, float shrinkage, int rule, float[] coefficients, "
    "Tensor? cost, Tensor? request_kv, Tensor(a!) scores, Tensor(b!)? counts, Tensor(c!)? load, "
    "Tensor(d!)? state, Tensor(e!)? chosen) -> ()",
    decide_ref,
)


@takes_arrays
def decide(
    histograms: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    scorer: Scorer,
    *,
    tokens: Tensor | None = None,
    assignment: Assignment | None = None,
    scores: Tensor | None = None,
    counts: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Decision:
    """From block histograms to scores, and to workers when `assignment` is given.

    Args:
        histograms: uint8 or uint16 [num_blocks, L, E], as for `gather_signatures`.
        block_ids: int32 [N], as for `gather_signatures`.
        offsets: int32 [R + 1], as for `gather_signatures`.
        scorer: `Centroids` or `Survival`, as for `score`.
        tokens: int32 [R], as for `score`.
        assignment: rule, loads and costs, as for `assign`; its load and state are updated.
        scores: float32 [R, W] to write into; allocated when None.
        counts: int32 [R, L, E] to write the signatures into as well; not written when None.
        chosen: int32 [R] to write into; allocated when None and there is an assignment.

    Raises:
        TypeError, ValueError: as the three ops raise them.
    """
    requests = check_blocks(histograms, block_ids, offsets)
    device, (layers, experts) = histograms.device, histograms.shape[1:]
    scores = check_scoring(scorer, tokens, scores, requests, layers * experts, device)
    if counts is not None:
        checks.tensor("counts", counts, torch.int32, (requests, layers, experts))
        checks.contiguous(counts=counts)
        checks.same_device("histograms", device, counts=counts)
    if assignment is None:
        if chosen is not None:
            raise ValueError("chosen: given without an assignment")
        if requests:
            scoring = operands(scorer, tokens)
            _op(histograms, block_ids, offsets, *scoring, 0, [], None, None, scores, counts,
                None, None, None)  # fmt: skip
        return Decision(scores, None)
    a = assignment
    workers = scores.shape[1]
    chosen = check_assignment(
        a.rule, a.load, a.cost, a.state, a.request_kv, chosen, requests, workers, device
    )
    if requests:
        _op(histograms, block_ids, offsets, *operands(scorer, tokens), a.rule.code,
            coefficients(a.rule), a.cost, a.request_kv, scores, counts, a.load, a.state,
            chosen)  # fmt: skip
    return Decision(scores, chosen)
