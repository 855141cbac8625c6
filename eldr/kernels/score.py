"""score: raw counts of R requests against W vectors; one dot product each and a cheap epilogue.

With c = counts[r] flattened to D = L * E cells:

    centroids   sim[r,w] = <c, V[w]> / |q * c|     V[w] = q * centroid[w], q = weights with the
    layer mask in them survival    dD[r,w]  = (<c, V[w]> + k * <g, V[w]>) / (tokens[r] + k)     =
    <p, V[w]>

where p = (c + k g) / (tokens + k) are activation probabilities shrunk towards the mean g, and V[w]
is the chance that no running request of worker w reads the expert; dD is then the expected number
of experts that r adds to a step of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.arrays import take_over, taken_over, takes_arrays
from eldr.kernels.device_kernel import DeviceFunction, ceil_div, device_kernel, power_of_two
from eldr.kernels.library import declare

if TYPE_CHECKING:
    import triton.language as tl

MAX_WORKERS = 1024
_TINY_NORM = 1e-24  # of the squared norm: an empty signature scores 0
_TINY_TOKENS = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Centroids:
    """Vectors of a partition, ready for cosine scores on raw counts.

    Attributes:
        vectors: float32 [W, D], weights * centroid.
        squares: float32 [D], weights ** 2.

    Raises:
        TypeError, ValueError: another dtype or shape, not contiguous, W outside 1..1024.
    """

    vectors: Tensor
    squares: Tensor

    def __post_init__(self) -> None:
        take_over(self, "vectors", "squares")
        cells = _check_vectors(self.vectors)
        checks.tensor("squares", self.squares, torch.float32, (cells,))
        checks.contiguous(squares=self.squares)
        checks.same_device("vectors", self.vectors.device, squares=self.squares)

    @classmethod
    def fold(cls, centroids: Tensor, weights: Tensor) -> Centroids:
        """Folds weights [L, E] (IDF, 0 in masked layers) into unit centroids [W, L, E].

        Raises:
            TypeError, ValueError: no floats, or other shapes.
        """
        vectors, q = _floats("centroids", centroids, "weights", weights)
        vectors = (vectors * q).flatten(1).contiguous()
        return cls(vectors, q.square().flatten().contiguous())


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """The workers' survival, ready for expected added experts of raw counts.

    Attributes:
        vectors: float32 [W, D], chance that no running request of w reads the expert in a step.
        prior: float32 [W], shrinkage * <mean, vectors[w]>.
        shrinkage: k >= 0, in tokens.

    Raises:
        TypeError, ValueError: another dtype or shape, not contiguous, W outside 1..1024, k < 0.
    """

    vectors: Tensor
    prior: Tensor
    shrinkage: float

    def __post_init__(self) -> None:
        take_over(self, "vectors", "prior")
        _check_vectors(self.vectors)
        checks.tensor("prior", self.prior, torch.float32, (self.vectors.shape[0],))
        checks.contiguous(prior=self.prior)
        checks.same_device("vectors", self.vectors.device, prior=self.prior)
        checks.non_negative("shrinkage", self.shrinkage)

    @classmethod
    def of(cls, survival: Tensor, mean: Tensor, shrinkage: float) -> Survival:
        """From survival [W, L, E], mean activation probabilities [L, E] and k.

        Raises:
            TypeError, ValueError: no floats, other shapes, k < 0.
        """
        checks.non_negative("shrinkage", shrinkage)
        vectors, g = _floats("survival", survival, "mean", mean)
        vectors = vectors.flatten(1).contiguous()
        return cls(vectors, vectors @ g.flatten() * shrinkage, shrinkage)


Scorer = Centroids | Survival


def score_ref(
    counts: Tensor,
    vectors: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    scores: Tensor,
) -> None:
    """The equation in plain torch, into `scores` [R, W]; arguments as the op's."""
    c = counts.flatten(1).to(torch.float32)
    total = c @ vectors.T
    if prior is not None:
        total += prior
    if squares is not None:
        total /= (c.square() @ squares).clamp(min=_TINY_NORM).sqrt()[:, None]
    if tokens is not None:
        total /= (tokens.to(torch.float32) + shrinkage).clamp(min=_TINY_TOKENS)[:, None]
    scores.copy_(total)


@DeviceFunction
def dot_workers(  # type: ignore[no-untyped-def]
    vectors_ptr, squares_ptr, dots_ptr, norms_ptr, x, d, part, cells, workers,
    WORKERS: tl.constexpr, NORM: tl.constexpr,
) -> None:  # fmt: skip
    """Writes dots[part, :] = <x, vectors[:, d]>, WORKERS at a time, and norms[part] if NORM."""
    for first in range(0, workers, WORKERS):
        w = first + tl.arange(0, WORKERS)
        mask = (w < workers)[:, None] & (d < cells)[None, :]
        cell = w.to(tl.int64)[:, None] * cells + d[None, :]
        v = tl.load(vectors_ptr + cell, mask=mask, other=0.0)
        tl.store(dots_ptr + part * workers + w, tl.sum(v * x[None, :], 1), mask=w < workers)
    if NORM:
        q = tl.load(squares_ptr + d, mask=d < cells, other=0.0)
        tl.store(norms_ptr + part, tl.sum(x * x * q, 0))


@device_kernel()
def score_rows_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, vectors_ptr, squares_ptr, dots_ptr, norms_ptr, cells, workers,
    COLUMNS: tl.constexpr, WORKERS: tl.constexpr, NORM: tl.constexpr,
) -> None:  # fmt: skip
    """dots[r,c,w] = <counts[r], vectors[w]> over chunk c; norms[r,c] = sum squares * counts^2.

    Grid (requests, chunks of COLUMNS cells). Each program keeps its counts on chip and walks the
    workers, WORKERS at a time; it writes dots[r, c, :] and norms[r, c].
    """
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = c * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(counts_ptr + r * cells + d, mask=d < cells, other=0).to(tl.float32)
    part = r * tl.num_programs(1) + c
    dot_workers(
        vectors_ptr, squares_ptr, dots_ptr, norms_ptr, x, d, part, cells, workers, WORKERS, NORM
    )


@device_kernel("requests")
def score_tile_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, vectors_ptr, squares_ptr, dots_ptr, norms_ptr, requests, cells, workers, chunks,
    COLUMNS: tl.constexpr, REQUESTS: tl.constexpr, WORKERS: tl.constexpr, STEP: tl.constexpr,
    NORM: tl.constexpr,
) -> None:  # fmt: skip
    """The same for many requests: a tile of REQUESTS x WORKERS dot products per program.

    Grid (tiles of requests, chunks of COLUMNS cells, tiles of workers). Full float32 products.
    Each program writes its tile of dots[:, c, :]; those of the first worker tile also write
    norms[:, c].
    """
    c = tl.program_id(1)
    r = (tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)).to(tl.int64)
    w = (tl.program_id(2) * WORKERS + tl.arange(0, WORKERS)).to(tl.int64)
    dots = tl.zeros([REQUESTS, WORKERS], tl.float32)
    norms = tl.zeros([REQUESTS], tl.float32)
    for first in range(0, COLUMNS, STEP):
        d = c * COLUMNS + first + tl.arange(0, STEP)
        mask_r = (r < requests)[:, None] & (d < cells)[None, :]
        mask_w = (w < workers)[:, None] & (d < cells)[None, :]
        x = tl.load(counts_ptr + r[:, None] * cells + d[None, :], mask=mask_r, other=0)
        x = x.to(tl.float32)
        v = tl.load(vectors_ptr + w[:, None] * cells + d[None, :], mask=mask_w, other=0.0)
        dots = tl.dot(x, tl.trans(v), dots, input_precision="ieee")
        if NORM:
            q = tl.load(squares_ptr + d, mask=d < cells, other=0.0)
            norms += tl.sum(x * x * q[None, :], 1)
    part = r * chunks + c
    mask = (r < requests)[:, None] & (w < workers)[None, :]
    tl.store(dots_ptr + part[:, None] * workers + w[None, :], dots, mask=mask)
    if NORM:
        mine = tl.where(tl.program_id(2) == 0, requests, 0)
        tl.store(norms_ptr + part, norms, mask=r < mine)


@device_kernel()
def score_finish_kernel(  # type: ignore[no-untyped-def]
    dots_ptr, norms_ptr, prior_ptr, tokens_ptr, scores_ptr, workers, chunks, shrinkage,
    CHUNKS: tl.constexpr, WORKERS: tl.constexpr, NORM: tl.constexpr, PRIOR: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """scores[r,w] = (sum_c dots[r,c,w] + prior[w]) / |norm or tokens + shrinkage|.

    Grid (requests, tiles of WORKERS). Each program writes scores[r, tile]; the order of the sum is
    fixed by CHUNKS.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    w = tl.program_id(1) * WORKERS + tl.arange(0, WORKERS)
    part = r * chunks + c
    mask = (c < chunks)[:, None] & (w < workers)[None, :]
    dots = tl.load(dots_ptr + part[:, None] * workers + w[None, :], mask=mask, other=0.0)
    total = tl.sum(dots, 0)
    if PRIOR:
        total += tl.load(prior_ptr + w, mask=w < workers, other=0.0)
    if NORM:
        norm = tl.sum(tl.load(norms_ptr + part, mask=c < chunks, other=0.0), 0)
        total = total / tl.sqrt(tl.maximum(norm, 1e-24))
    if TOKENS:
        tokens = tl.load(tokens_ptr + r).to(tl.float32) + shrinkage
        total = total / tl.maximum(tokens, 1e-12)
    tl.store(scores_ptr + r * workers + w, total, mask=w < workers)


COLUMNS = 512  # cells of one program
TILE_REQUESTS = 16  # the smallest tile of tl.dot; fewer requests go row by row


def score_triton(
    counts: Tensor,
    vectors: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    scores: Tensor,
) -> None:
    """Launches the partial sums, then the epilogue; arguments as the op's, already checked."""
    requests, layers, experts = counts.shape
    cells, workers = layers * experts, vectors.shape[0]
    dots, norms = partials(counts.device, requests, cells, workers)
    given = vectors if squares is None else squares
    if requests < TILE_REQUESTS or workers < 16:
        score_rows_kernel[(requests, dots.shape[1])](
            counts, vectors, given, dots, norms, cells, workers, COLUMNS=COLUMNS, WORKERS=16,
            NORM=squares is not None, num_warps=4,
        )  # fmt: skip
    else:
        tile = 64 if workers > 32 else 32
        grid = (ceil_div(requests, TILE_REQUESTS), dots.shape[1], ceil_div(workers, tile))
        score_tile_kernel[grid](
            counts, vectors, given, dots, norms, requests, cells, workers, dots.shape[1],
            COLUMNS=COLUMNS, REQUESTS=TILE_REQUESTS, WORKERS=tile, STEP=32,
            NORM=squares is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    finish_scores(dots, norms, prior, squares, tokens, shrinkage, scores)


def partials(
    device: torch.device, requests: int, cells: int, workers: int
) -> tuple[Tensor, Tensor]:
    """Scratch for partial sums: dots [R, C, W] and norms [R, C], float32."""
    chunks = ceil_div(cells, COLUMNS)
    dots = torch.empty((requests, chunks, workers), dtype=torch.float32, device=device)
    return dots, torch.empty((requests, chunks), dtype=torch.float32, device=device)


def finish_scores(
    dots: Tensor,
    norms: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    scores: Tensor,
) -> None:
    """Launches `score_finish_kernel` on the partial sums."""
    requests, chunks, workers = dots.shape
    width = power_of_two(min(workers, 64), least=16)
    score_finish_kernel[(requests, ceil_div(workers, width))](
        dots, norms, dots if prior is None else prior, dots if tokens is None else tokens, scores,
        workers, chunks, float(shrinkage), CHUNKS=power_of_two(chunks), WORKERS=width,
        NORM=squares is not None, PRIOR=prior is not None, TOKENS=tokens is not None, num_warps=4,
    )  # fmt: skip


_op = declare(
    "score(Tensor counts, Tensor vectors, Tensor? prior, Tensor? squares, Tensor? tokens, "
    "float shrinkage, Tensor(a!) scores) -> ()",
    score_ref,
)


@takes_arrays
def score(
    counts: Tensor, scorer: Scorer, *, tokens: Tensor | None = None, scores: Tensor | None = None
) -> Tensor:
    """Scores R signatures against W vectors; the same bits for the same input on one backend.

    Args:
        counts: int32 [R, L, E].
        scorer: `Centroids` (cosine similarity) or `Survival` (expected added experts).
        tokens: int32 [R], tokens that each row of counts holds; with `Survival` only.
        scores: float32 [R, W] to write into; allocated when None.

    Returns:
        scores, float32 [R, W].

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout; tokens
            missing with `Survival` or given with `Centroids`.
    """
    checks.tensor("counts", counts, torch.int32, ("R", "L", "E"))
    checks.contiguous(counts=counts)
    requests, layers, experts = counts.shape
    scores = check_scoring(scorer, tokens, scores, requests, layers * experts, counts.device)
    if requests:
        _op(counts, *operands(scorer, tokens), scores)
    return scores


def operands(
    scorer: Scorer, tokens: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float]:
    """(vectors, prior, squares, tokens, shrinkage) as the ops take them."""
    if isinstance(scorer, Centroids):
        return scorer.vectors, None, scorer.squares, None, 0.0
    return scorer.vectors, scorer.prior, None, tokens, scorer.shrinkage


def check_scoring(
    scorer: Scorer,
    tokens: Tensor | None,
    scores: Tensor | None,
    requests: int,
    cells: int,
    device: torch.device,
) -> Tensor:
    """Checks what `score` and `decide` share; returns `scores`, allocated when None."""
    if not isinstance(scorer, Centroids | Survival):
        raise TypeError(f"scorer: expected Centroids or Survival, got {type(scorer).__name__}")
    workers, have = scorer.vectors.shape
    if have != cells:
        raise ValueError(f"scorer: vectors have {have} cells, the counts have {cells}")
    if isinstance(scorer, Survival) != (tokens is not None):
        raise ValueError("tokens: needed with Survival and meaningless with Centroids")
    if tokens is not None:
        checks.tensor("tokens", tokens, torch.int32, (requests,))
        checks.contiguous(tokens=tokens)
        checks.within("tokens", tokens, 0, checks.INT32_MAX, "token counts")
    if scores is None:
        scores = torch.empty((requests, workers), dtype=torch.float32, device=device)
    else:
        checks.tensor("scores", scores, torch.float32, (requests, workers))
        checks.contiguous(scores=scores)
    checks.same_device("counts", device, vectors=scorer.vectors, tokens=tokens, scores=scores)
    return scores


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _floats(per_worker: str, whole: Tensor, shared: str, part: Tensor) -> tuple[Tensor, Tensor]:
    """[W, L, E] and [L, E] in float32, checked: torch would broadcast what does not fit."""
    whole = checks.tensor(per_worker, taken_over(per_worker, whole), _FLOATS, ("W", "L", "E"))
    part = checks.tensor(shared, taken_over(shared, part), _FLOATS, whole.shape[1:])
    checks.same_device(per_worker, whole.device, **{shared: part})
    return whole.to(torch.float32), part.to(torch.float32)


def _check_vectors(vectors: Tensor) -> int:
    checks.tensor("vectors", vectors, torch.float32, ("W", "D"))
    checks.contiguous(vectors=vectors)
    checks.integer("vectors", vectors.shape[0], 1, MAX_WORKERS, ", the number of workers W")
    return vectors.shape[1]
