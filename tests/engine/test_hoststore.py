from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

torch = pytest.importorskip("torch")

from eldr.engine.hoststore import HostRows, StoreIndex  # noqa: E402
from eldr.engine.restore import StorePlanner  # noqa: E402
from eldr.engine.uncovered import UncoveredBlocks  # noqa: E402

SLOTS = 3
KEYS = st.sampled_from("abcdefg")


class Index(RuleBasedStateMachine):
    """Against a list in order of use, and the rows that a worker would hold."""

    def __init__(self):
        super().__init__()
        self.index = StoreIndex(SLOTS)
        self.order, self.arrived, self.coming = [], set(), []
        self.rows = {}

    @rule(key=KEYS)
    def reserve(self, key):
        slot = self.index.reserve(key)
        assert (slot is None) == (key in self.order)
        if slot is None:
            self.order.remove(key)
        else:
            if len(self.order) == SLOTS:
                self.arrived.discard(self.order.pop(0))
            self.coming.append((key, slot))
        self.order.append(key)

    @rule()
    def save(self):
        for key, slot in self.coming:
            self.rows[slot] = key
            if key in self.order and self.index._slots[key] == slot:
                self.arrived.add(key)
        self.index.saved(self.coming)
        self.coming = []

    @rule(key=KEYS)
    def find(self, key):
        slot = self.index.find(key)
        assert (slot is not None) == (key in self.arrived)
        if slot is not None:
            assert self.rows[slot] == key
            self.order.remove(key)
            self.order.append(key)

    @invariant()
    def bounded(self):
        assert self.index.totals.rows == len(self.order) <= SLOTS


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_rows_come_back_as_they_left(dtype):
    histograms = torch.arange(5 * 2 * 3).reshape(5, 2, 3).to(dtype)
    before = histograms.clone()
    rows = HostRows(4, histograms)
    leaving = rows.save([(1, 3), (4, 0)])
    histograms.view(torch.uint8).zero_()  # staged already: the copy shows the step's own rows
    leaving.enqueue_copy()
    leaving.finish()
    rows.restore([(3, 2), (0, 1)])
    assert histograms[2].tolist() == before[1].tolist()
    assert histograms[1].tolist() == before[4].tolist()
    assert int(histograms[[0, 3, 4]].to(torch.int64).sum()) == 0


def request(tokens, hashes):
    return SimpleNamespace(num_tokens=tokens, block_hashes=hashes)


def planner(slots=8):
    uncovered = UncoveredBlocks(4)
    return StorePlanner(slots, 4, uncovered), uncovered


def test_a_block_is_saved_when_its_last_slot_is_computed_and_found_once_it_arrived():
    plan, uncovered = planner()
    r = request(11, ["h0", "h1"])
    assert plan.filled(1, r, [5, 6, 7], 0, 3) == []
    (first,) = plan.filled(2, r, [5, 6, 7], 3, 6)
    assert first[0] == 5
    (second,) = plan.filled(3, r, [5, 6, 7], 6, 11)
    assert second[0] == 6
    plan.received(2)
    uncovered.add([8, 9])
    plan.loaded(r, [8, 9], 0, 8)
    assert plan.take_restores() == ((first[1], 8),)
    assert plan.take_restores() == ()
    assert 8 not in uncovered
    assert 9 in uncovered  # its row is still under way
    assert (plan.totals.hits, plan.totals.misses) == (1, 1)


def test_uncovered_dropped_and_partly_loaded_blocks_take_no_part():
    plan, uncovered = planner()
    uncovered.add([5])
    r = request(12, ["h0", "h1", "h2"])
    saved = plan.filled(1, r, [5, 0, 7], 0, 12)
    assert [block for block, _ in saved] == [7]
    plan.received(1)
    plan.loaded(r, [1, 2, 3], 9, 12)  # the third block's first token is here already
    assert plan.take_restores() == ()


def test_a_block_that_is_loaded_again_before_a_step_is_restored_once_with_its_latest_row():
    plan, uncovered = planner()
    r = request(8, ["h0", "h1"])
    saved = dict(plan.filled(1, r, [5, 6], 0, 8))
    plan.received(1)
    uncovered.add([9])
    plan.loaded(r, [9], 0, 4)  # aborted before the step; its block goes to another request
    uncovered.add([8, 9])
    plan.loaded(r, [8, 9], 0, 8)
    assert sorted(plan.take_restores()) == sorted([(saved[5], 8), (saved[6], 9)])


def test_hashes_of_another_block_size_keep_the_store_empty(caplog):
    plan, _ = planner()
    assert plan.filled(1, request(8, ["a", "b", "c", "d"]), [5, 6], 0, 8) == []
    assert "finer than KV blocks" in caplog.text
