"""csrc/cuda/decide.cu in emulation against NumPy: counts and choices exact, scores to rounding."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda import oracle
from tests.kernels.cuda.emulation import (
    CLOSED,
    LEAST_LOAD,
    LOCALITY_BAND,
    MARGINAL_COST,
    UNSUPPORTED,
    AssignArgs,
    DecideArgs,
    Device,
    GatherArgs,
    ScoreArgs,
)
from tests.kernels.cuda.oracle import Assignment


@dataclass
class Case:
    """One random decision problem."""

    requests: int
    workers: int
    cells: int
    blocks_each: int = 6
    row: type = np.uint8
    num_blocks: int = 40
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        rng = self.rng
        self.rows = rng.integers(0, 17, (self.num_blocks, self.cells)).astype(self.row)
        lengths = rng.integers(0, self.blocks_each + 1, self.requests)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.block_ids = rng.integers(-1, self.num_blocks + 1, self.offsets[-1]).astype(np.int32)
        self.vectors = (rng.random((self.workers, self.cells)) / self.cells).astype(np.float32)
        self.squares = rng.random(self.cells).astype(np.float32)
        self.prior = rng.random(self.workers).astype(np.float32)
        self.tokens = rng.integers(0, 900, self.requests).astype(np.int32)

    @property
    def lists(self) -> tuple[np.ndarray, ...]:
        return self.rows, self.block_ids, self.offsets, self.vectors

    def form(self, name: str) -> dict[str, Any]:
        if name == "centroids":
            return {"squares": self.squares}
        if name == "survival":
            return {"prior": self.prior, "tokens": self.tokens, "shrinkage": 16.0}
        return {}

    def assignment(self, rule: int) -> Assignment:
        load = self.rng.integers(0, 5, self.workers).astype(np.int32)
        load[1::5] = CLOSED
        cost = self.rng.integers(0, 4, self.requests).astype(np.int32)
        out = Assignment(rule, load, cost, tau=0.02)
        if rule == MARGINAL_COST:
            out.coefficients = (0.5, 0.1, 0.3, 1.0)
            out.state = (9 * self.rng.random((2, self.workers))).astype(np.float32)
            out.request_kv = self.rng.random(self.requests).astype(np.float32)
        return out


SHAPES = [
    Case(1, 2, 60),
    Case(1, 16, 48 * 128, blocks_each=128),
    Case(8, 16, 3 * 128, row=np.uint16),
    Case(5, 33, 7 * 62, row=np.uint16),  # unaligned rows
    Case(5, 17, 513),
    Case(3, 1024, 4 * 64),
    Case(256, 2, 1000),
    Case(
        61, 5, 33 * 512, blocks_each=2
    ),  # enough thread blocks for groups of four, the last one partial
    Case(61, 5, 4133, blocks_each=2),
]


@pytest.mark.parametrize("form", ["centroids", "survival", "plain"])
@pytest.mark.parametrize(
    "case", SHAPES, ids=lambda c: f"R{c.requests} W{c.workers} D{c.cells} {c.row.__name__}"
)
def test_counts_are_exact_and_scores_right_to_rounding(
    device: Device, case: Case, form: str
) -> None:
    expected = oracle.gather(*case.lists[:3])
    out = device.decide(*case.lists, counts=True, **case.form(form))
    np.testing.assert_array_equal(out.counts, expected)
    reference = oracle.scores(expected, case.vectors, **case.form(form))
    np.testing.assert_allclose(out.scores, reference, rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("rule", [LEAST_LOAD, LOCALITY_BAND, MARGINAL_COST])
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"R{c.requests} W{c.workers} D{c.cells}")
def test_choices_follow_the_rule(device: Device, case: Case, rule: int) -> None:
    assignment = case.assignment(rule)
    theirs = copy.deepcopy(assignment)
    form = "survival" if rule == MARGINAL_COST else "centroids"
    out = device.decide(*case.lists, assignment=assignment, **case.form(form))
    np.testing.assert_array_equal(out.chosen, theirs.run(out.scores))
    np.testing.assert_array_equal(assignment.load, theirs.load)
    if rule == MARGINAL_COST:
        np.testing.assert_array_equal(assignment.state, theirs.state)


def test_the_bits_do_not_depend_on_the_order_of_threads_and_blocks(device: Device) -> None:
    case = Case(9, 12, 5 * 128)
    outputs = []
    for seed in range(6):
        device.reset(seed, resident=1 + seed)
        assignment = Case(9, 12, 5 * 128).assignment(LOCALITY_BAND)
        out = device.decide(*case.lists, assignment=assignment, **case.form("centroids"))
        outputs.append((out.scores.tobytes(), out.chosen.tobytes(), assignment.load.tobytes()))
    assert len(set(outputs)) == 1


def test_one_workspace_serves_call_after_call(device: Device) -> None:
    big, small = Case(20, 9, 6 * 128), Case(3, 4, 128)
    workspace = device.workspace(20, 6 * 128, 9)
    for case in (big, small, big, small, big):
        assignment = case.assignment(LEAST_LOAD)
        theirs = copy.deepcopy(assignment)
        out = device.decide(*case.lists, assignment=assignment, workspace=workspace)
        reference = oracle.scores(oracle.gather(*case.lists[:3]), case.vectors)
        np.testing.assert_allclose(out.scores, reference, rtol=3e-6, atol=1e-12)
        np.testing.assert_array_equal(out.chosen, theirs.run(out.scores))


def test_single_requests_and_groups_give_the_same_bits(device: Device) -> None:
    case = Case(40, 6, 40 * 512, blocks_each=2)
    together = device.decide(*case.lists, **case.form("centroids")).scores
    for r in (0, 17, 39):
        alone = device.decide(
            case.rows,
            case.block_ids,
            case.offsets[r : r + 2].copy(),
            case.vectors,
            squares=case.squares,
        )
        np.testing.assert_array_equal(alone.scores[0], together[r])


def test_long_lists_of_full_rows_do_not_overflow(device: Device) -> None:
    rows = np.full((2, 64), 255, np.uint8)
    block_ids = np.zeros(16 * 256 * 2 + 5, np.int32)  # more than two flushes of every warp
    offsets = np.array([0, len(block_ids)], np.int32)
    out = device.decide(rows, block_ids, offsets, np.ones((1, 64), np.float32), counts=True)
    assert (out.counts == 255 * len(block_ids)).all()


def test_offsets_outside_the_list_are_clamped(device: Device) -> None:
    rows = np.ones((4, 32), np.uint8)
    offsets = np.array([-5, 2, 99], np.int32)
    out = device.decide(
        rows, np.arange(4, dtype=np.int32), offsets, np.ones((1, 32), np.float32), counts=True
    )
    assert out.counts[:, 0].tolist() == [2, 2]


def test_not_a_number_is_the_worst_score(device: Device) -> None:
    rows = np.ones((1, 32), np.uint8)
    lists = (rows, np.zeros(3, np.int32), np.array([0, 1, 2, 3], np.int32))
    vectors = np.ones((3, 32), np.float32)
    vectors[0], vectors[2] = np.nan, 0.5
    for rule, expected in ((LOCALITY_BAND, [1, 1, 1]), (LEAST_LOAD, [0, 1, 2])):
        assignment = Assignment(rule, np.zeros(3, np.int32), np.ones(3, np.int32), tau=0.1)
        assert device.decide(*lists, vectors, assignment=assignment).chosen.tolist() == expected


def test_all_workers_closed(device: Device) -> None:
    case = Case(3, 4, 64)
    for rule in (LEAST_LOAD, LOCALITY_BAND, MARGINAL_COST):
        assignment = case.assignment(rule)
        assignment.load[:] = CLOSED
        assert device.decide(*case.lists, assignment=assignment).chosen.tolist() == [-1, -1, -1]
        assert (assignment.load == CLOSED).all()


def test_loads_stop_below_closed(device: Device) -> None:
    case = Case(3, 1, 64)
    assignment = Assignment(
        LEAST_LOAD, np.array([CLOSED - 2], np.int32), np.full(3, CLOSED, np.int32)
    )
    assert device.decide(*case.lists, assignment=assignment).chosen.tolist() == [0, 0, 0]
    assert assignment.load.tolist() == [CLOSED - 1]


@pytest.mark.parametrize(
    ("requests", "cells", "workers"), [(1, 16, 1025), (1025, 16, 1), (1, 2**25, 1)]
)
def test_shapes_it_cannot_do_are_refused(
    device: Device, requests: int, cells: int, workers: int
) -> None:
    assert device.lib.eldr_cuda_decide_workspace(requests, cells, workers) == 0
    args = DecideArgs(
        GatherArgs(requests=requests, cells=cells), ScoreArgs(workers=workers), AssignArgs()
    )
    assert device.lib.eldr_cuda_decide(ctypes.byref(args), None, None) == UNSUPPORTED
