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

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.library import declare

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
        cells = _check_vectors(self.vectors)
        checks.tensor("squares", self.squares, torch.float32, (cells,))
        checks.contiguous(squares=self.squares)
        checks.same_device("vectors", self.vectors.device, squares=self.squares)

    @classmethod
    def fold(cls, centroids: Tensor, weights: Tensor) -> Centroids:
        """Folds weights [L, E] (IDF, 0 in masked layers) into unit centroids [W, L, E]."""
        q = weights.to(torch.float32)
        vectors = (centroids.to(torch.float32) * q).flatten(1).contiguous()
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
        _check_vectors(self.vectors)
        checks.tensor("prior", self.prior, torch.float32, (self.vectors.shape[0],))
        checks.contiguous(prior=self.prior)
        checks.same_device("vectors", self.vectors.device, prior=self.prior)
        if not 0.0 <= self.shrinkage < float("inf"):
            raise ValueError(f"shrinkage: {self.shrinkage!r} is not a finite number >= 0")

    @classmethod
    def of(cls, survival: Tensor, mean: Tensor, shrinkage: float) -> Survival:
        """From survival [W, L, E], mean activation probabilities [L, E] and k."""
        vectors = survival.to(torch.float32).flatten(1).contiguous()
        return cls(vectors, vectors @ mean.to(torch.float32).flatten() * shrinkage, shrinkage)


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


_op = declare(
    "score(Tensor counts, Tensor vectors, Tensor? prior, Tensor? squares, Tensor? tokens, "
    "float shrinkage, Tensor(a!) scores) -> ()",
    score_ref,
)


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


def _check_vectors(vectors: Tensor) -> int:
    checks.tensor("vectors", vectors, torch.float32, ("W", "D"))
    checks.contiguous(vectors=vectors)
    checks.integer("vectors", vectors.shape[0], 1, MAX_WORKERS, ", the number of workers W")
    return vectors.shape[1]
