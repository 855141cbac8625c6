import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

torch = pytest.importorskip("torch")

from eldr.engine.cache import SignatureCache  # noqa: E402
from eldr.engine.layout import BlockLayout  # noqa: E402
from eldr.engine.step import PromptEnd  # noqa: E402
from eldr.geometry import Geometry  # noqa: E402

GEOMETRY = Geometry(2, 8, 3)


def fills(tokens, block_size):
    return tuple(min(block_size, tokens - at) for at in range(0, tokens, block_size))


class Sequence:
    def __init__(self, blocks, ids):
        self.blocks, self.ids, self.done = blocks, ids, 0


class Cache(RuleBasedStateMachine):
    """Requests start, advance by chunks, end and free their blocks, in any order."""

    block_size = 4

    def __init__(self):
        super().__init__()
        self.cache = SignatureCache(
            BlockLayout(0, self.block_size, 24), GEOMETRY, torch.device("cpu")
        )
        self.free = list(range(1, 24))
        self.running = {}
        self.names = 0
        self.rng = np.random.default_rng(0)

    @precondition(lambda self: len(self.free) >= 5)
    @rule(tokens=st.integers(1, 20), order=st.randoms(use_true_random=False))
    def start(self, tokens, order):
        order.shuffle(self.free)
        count = -(-tokens // self.block_size)
        blocks, self.free = self.free[:count], self.free[count:]
        shape = (tokens, GEOMETRY.layers)
        ids = np.array(
            [
                [self.rng.permutation(GEOMETRY.experts)[: GEOMETRY.top_k] for _ in range(shape[1])]
                for _ in range(shape[0])
            ]
        )
        self.running[f"r{self.names}"] = Sequence(blocks, ids)
        self.names += 1

    @precondition(lambda self: self.running)
    @rule(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4))
    def step(self, chunks):
        slots, ids, ends = [], [], []
        for (name, request), chunk in zip(self.running.items(), chunks, strict=False):
            stop = min(request.done + chunk, len(request.ids))
            for p in range(request.done, stop):
                block = request.blocks[p // self.block_size]
                slots.append(block * self.block_size + p % self.block_size)
                ids.append(request.ids[p])
            request.done = stop
            if stop == len(request.ids):
                ends.append(name)
        padded = np.concatenate([np.array(ids), np.full((3, 2, 3), 7)])
        self.cache.accumulate(
            torch.tensor(padded, dtype=torch.int32), torch.tensor([*slots, -1, -1, -1])
        )
        self.check(ends)
        for name in ends:
            self.free += self.running.pop(name).blocks

    def check(self, names):
        if not names:
            return
        ends = [
            PromptEnd(
                name,
                tuple(self.running[name].blocks),
                fills(len(self.running[name].ids), self.block_size),
                len(self.running[name].ids),
            )
            for name in names
        ]
        gathered = self.cache.gather(ends)
        gathered.enqueue_copy()
        for name, found in gathered.result().items():
            ids = self.running[name].ids
            expected = [
                np.bincount(ids[:, layer].ravel(), minlength=GEOMETRY.experts) for layer in (0, 1)
            ]
            np.testing.assert_array_equal(found.counts, expected)
            assert found.covered == found.tokens == len(ids)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self):
        request = next(iter(self.running.values()))
        request.done = 0
        self.free += request.blocks
        request.blocks, self.free = (
            self.free[: len(request.blocks)],
            self.free[len(request.blocks) :],
        )


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def filled_cache(block_size, blocks=3):
    cache = SignatureCache(BlockLayout(0, block_size, blocks), GEOMETRY, torch.device("cpu"))
    tokens = block_size * (blocks - 1)
    ids = torch.arange(GEOMETRY.top_k).expand(tokens, GEOMETRY.layers, -1).int().contiguous()
    cache.accumulate(ids, torch.arange(block_size, block_size + tokens))
    return cache


def gather(cache, *ends):
    gathered = cache.gather(ends)
    gathered.enqueue_copy()
    return gathered.result()


@pytest.mark.parametrize(
    ("block_size", "dtype"), [(255, torch.uint8), (256, torch.uint16), (1000, torch.uint16)]
)
def test_a_full_block_of_one_expert_is_counted_at_every_width(block_size, dtype):
    cache = filled_cache(block_size)
    assert cache.histograms.dtype == dtype
    end = PromptEnd("r", (1, 2), (block_size, block_size), 2 * block_size)
    found = gather(cache, end)["r"]
    assert found.counts[0].tolist() == [2 * block_size] * 3 + [0] * 5
    assert found.covered == 2 * block_size


def test_the_guard_leaves_out_a_row_that_cannot_be_right():
    cache = filled_cache(4)
    found = gather(cache, PromptEnd("a", (1, 2), (4, 3), 7), PromptEnd("b", (2, 1), (4, 4), 8))
    assert found["a"].covered == 4  # block 2 holds four tokens, not three
    assert found["a"].counts.sum() == 4 * GEOMETRY.top_k * GEOMETRY.layers
    assert found["b"].covered == 8


def test_the_guard_looks_at_every_layer():
    cache = filled_cache(4)
    cache.histograms[1, 1, 0] -= 1
    assert gather(cache, PromptEnd("r", (1,), (4,), 4))["r"].covered == 0


def test_a_prompt_without_a_covered_block_has_an_empty_signature():
    found = gather(filled_cache(4), PromptEnd("r", (), (), 9))["r"]
    assert (found.covered, found.tokens, int(found.counts.sum())) == (0, 9, 0)
