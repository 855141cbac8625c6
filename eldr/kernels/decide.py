"""decide: gather + score (+ assign) in one call, without writing the signatures out.

    counts = gather_signatures(...); scores = score(counts, ...); chosen = assign(scores, ...)

The intermediate counts [R, L * E] stay on chip: a program sums its columns of a request's block
rows and multiplies them with the same columns of the W vectors at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.assign import Rule, assign_ref, check_assignment, coefficients
from eldr.kernels.gather import check_blocks, gather_signatures_ref
from eldr.kernels.library import declare
from eldr.kernels.score import Scorer, check_scoring, operands, score_ref


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What `decide` needs to assign as well; fields as the arguments of `assign`."""

    rule: Rule
    load: Tensor
    cost: Tensor
    state: Tensor | None = None
    request_kv: Tensor | None = None


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


_op = declare(
    "decide(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor vectors, Tensor? prior, "
    "Tensor? squares, Tensor? tokens, float shrinkage, int rule, float[] coefficients, "
    "Tensor? cost, Tensor? request_kv, Tensor(a!) scores, Tensor(b!)? counts, Tensor(c!)? load, "
    "Tensor(d!)? state, Tensor(e!)? chosen) -> ()",
    decide_ref,
)


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
