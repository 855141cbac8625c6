"""Every backend against the reference: counts bit for bit, scores to rounding, choices exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from eldr.kernels import assign_ref
from profiling.gpu_check.backends import Implementation
from profiling.gpu_check.inputs import (
    Question,
    Step,
    accumulate_arguments,
    copied,
    decide_arguments,
)

SCORE_RTOL = 2e-5  # fp32 sums of up to 2^14 terms in another order
STEPS = (
    Step(777, 48, 128, 8, 16),
    Step(1000, 5, 60, 6, 16, outside=True),
    Step(1000, 3, 62, 3, 24, ids=torch.int64, outside=True),
    Step(600, 4, 256, 8, 64, ids=torch.uint8),
    Step(1100, 3, 512, 16, 256, histogram=torch.uint16, ids=torch.uint16, outside=True),
    Step(3, 2, 128, 8, 16, requests=1),
)
QUESTIONS = tuple(
    Question(r, w, layers, experts, blocks, rule, cached_blocks=200)
    for (r, w, layers, experts, blocks), rule in itertools.product(
        ((1, 2, 48, 128, 9), (16, 16, 5, 60, 33), (64, 300, 3, 62, 5), (7, 1024, 4, 128, 2)),
        (1, 2, 3),
    )
)
_SCORES, _COUNTS, _LOAD, _STATE, _CHOSEN = 12, 13, 14, 15, 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison; `wrong` is empty where it holds."""

    op: str
    backend: str
    case: str
    wrong: str

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def check_accumulate(
    name: str, implementation: Implementation, reference: Implementation, device: torch.device
) -> Iterator[Verdict]:
    """All steps on `device` against the reference on the CPU."""
    for seed, step in enumerate(STEPS):
        arguments = accumulate_arguments(step, torch.device("cpu"), seed)
        ours = copied(arguments, device)
        implementation(*ours)
        reference(*arguments)
        yield Verdict("accumulate_hits", name, step.name, _difference(ours[3], arguments[3]))


def check_decide(
    name: str, implementation: Implementation, reference: Implementation, device: torch.device
) -> Iterator[Verdict]:
    """All questions; choices are compared with the rule applied to the backend's own scores."""
    for seed, question in enumerate(QUESTIONS):
        arguments = decide_arguments(question, torch.device("cpu"), seed)
        ours = copied(arguments, device)
        before = copied(arguments)
        implementation(*ours)
        reference(*arguments)
        got = copied(ours, torch.device("cpu"))
        wrong = _difference(got[_COUNTS], arguments[_COUNTS])
        wrong = wrong or _far(got[_SCORES], arguments[_SCORES])
        wrong = wrong or _misassigned(question, got, before)
        yield Verdict("decide", name, question.name, wrong)


def _misassigned(question: Question, got: list[object], before: list[object]) -> str:
    load, state, chosen = (before[i] for i in (_LOAD, _STATE, _CHOSEN))
    assign_ref(got[_SCORES], question.rule, before[9], before[10], before[11], load, state, chosen)  # type: ignore[arg-type]
    for at, expected, what in ((_CHOSEN, chosen, "chosen"), (_LOAD, load, "load")):
        if wrong := _difference(got[at], expected):
            return f"{what}: {wrong}"
    return ""


def _difference(got: object, expected: object) -> str:
    assert isinstance(got, Tensor)
    assert isinstance(expected, Tensor)
    ours, theirs = got.cpu().long(), expected.cpu().long()
    different = int((ours != theirs).sum())
    if not different:
        return ""
    at = tuple((ours != theirs).nonzero()[0].tolist())
    return f"{different} of {ours.numel()} differ, first at {at}: {ours[at]} for {theirs[at]}"


def _far(got: object, expected: object) -> str:
    assert isinstance(got, Tensor)
    assert isinstance(expected, Tensor)
    error = ((got - expected).abs() / expected.abs().clamp(min=1e-12)).max().item()
    return "" if error <= SCORE_RTOL else f"scores: relative error {error:.2e} > {SCORE_RTOL:.0e}"
