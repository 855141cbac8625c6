"""The scheduler's hook on fake schedules; the real scheduler drives it in test_signatures.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from eldr.engine.config import EngineConfig
from eldr.engine.layout import BlockLayout
from eldr.engine.scheduler import SchedulerHook, wants_signature
from eldr.engine.step import Gathered, StepResult
from eldr.geometry import Geometry
from eldr.signature import decode

GEOMETRY = Geometry(2, 4, 2)
ASKS = {"eldr": {"counts": True}}


class Engine:
    """Just enough of vLLM's scheduler: requests with a block table, and steps."""

    def __init__(self, role="both", block_size=4, **settings):
        self.hook = SchedulerHook(EngineConfig(role, **settings), BlockLayout(1, block_size, 100))
        self.requests = {}
        self.tables = {}
        self.finished = set()

    def add(self, name, prompt, table, params=ASKS, computed=0):
        self.requests[name] = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            num_in_flight_tokens=0,
            kv_transfer_params=params,
        )
        self.tables[name] = table

    def get_block_ids(self, name):
        return ([], self.tables[name])

    def schedule(self, tokens, new=(), drafts=None, copies=None):
        self.output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_spec_decode_tokens=drafts or {},
            finished_req_ids=self.finished,
            kv_cache_block_copies=copies,
        )
        self.finished = set()
        step = self.hook.build_metadata(self.output, self.requests, self)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return step

    def receive(self, signatures=None, sampled=()):
        names = list(self.output.num_scheduled_tokens)
        result = StepResult(GEOMETRY, signatures) if signatures is not None else None
        self.hook.receive(
            self.output,
            SimpleNamespace(
                eldr_output=result,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=list(sampled),
            ),
        )


def gathered(tokens, covered=None):
    covered = tokens if covered is None else covered
    counts = np.zeros((2, 4), np.uint32)
    counts[:, :2] = covered
    return Gathered(counts, covered, tokens)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"do_remote_decode": True}, True),
        (ASKS, True),
        ({"do_remote_decode": False}, False),
        ({"eldr": {"counts": 1}}, False),
        ({"eldr": True}, False),
        ({"do_remote_prefill": True}, False),
        ({}, False),
        (None, False),
    ],
)
def test_who_wants_a_signature(params, wanted):
    assert wants_signature(params) is wanted


def test_the_prompt_ends_with_its_last_chunk_and_the_answer_carries_the_signature():
    engine = Engine()
    engine.add("r", 10, [5, 6, 7])
    assert engine.schedule({"r": 6}, new=["r"]).ends == ()
    engine.receive()
    (end,) = engine.schedule({"r": 4}).ends
    assert (end.blocks, end.fills, end.tokens) == ((5, 6, 7), (4, 4, 2), 10)
    engine.receive({"r": gathered(10)})
    assert engine.schedule({"r": 1}).ends == ()  # decoding
    params = engine.hook.finish(engine.requests["r"], {"remote_host": "h"})
    assert params["remote_host"] == "h"
    found = decode(params["eldr"], GEOMETRY)
    assert (found.tokens, found.coverage, found.counts[0].tolist()) == (10, 1.0, [10, 10, 0, 0])


@pytest.mark.parametrize(
    ("form", "version", "first_layer"),
    [
        ("exact", 1, [300, 300, 0, 0]),
        ("8bit", 2, [300, 300, 0, 0]),
        ("sampled", 2, [128, 128, 0, 0]),
    ],
)
def test_the_signature_is_sent_in_the_configured_form(form, version, first_layer):
    engine = Engine(block_size=300, signature_form=form)
    engine.add("r", 300, [5])
    engine.schedule({"r": 300}, new=["r"])
    engine.receive({"r": gathered(300)})
    payload = engine.hook.finish(engine.requests["r"], None)["eldr"]
    found = decode(payload, GEOMETRY)
    assert payload["v"] == version
    assert (found.tokens, found.coverage, found.counts[0].tolist()) == (300, 1.0, first_layer)
    assert found.covered == (128 if form == "sampled" else 300)


def test_a_request_that_does_not_ask_is_answered_unchanged():
    engine = Engine()
    engine.add("r", 4, [5], params=None)
    assert engine.schedule({"r": 4}, new=["r"]).ends == ()
    engine.receive({})
    assert engine.hook.finish(engine.requests["r"], None) is None


def test_an_aborted_request_leaves_nothing_behind():
    engine = Engine()
    engine.add("r", 4, [5])
    engine.schedule({"r": 4}, new=["r"])
    engine.finished = {"r"}
    late = engine.output
    engine.schedule({})
    engine.output = late
    engine.receive({"r": gathered(4)})
    assert engine.hook.finish(engine.requests["r"], None) is None


def test_preempted_before_the_end_it_ends_later_and_preempted_after_it_does_not_end_twice():
    engine = Engine()
    engine.add("r", 6, [5, 6])
    engine.schedule({"r": 4}, new=["r"])
    engine.requests["r"].num_computed_tokens = 0  # preempted, resumed as a new request
    engine.tables["r"] = [8, 9]
    (end,) = engine.schedule({"r": 6}, new=["r"]).ends
    assert end.blocks == (8, 9)
    engine.requests["r"].num_computed_tokens = 0
    assert engine.schedule({"r": 7}, new=["r"]).ends == ()


def test_blocks_that_a_connector_fills_are_left_out_until_they_are_computed_again():
    engine = Engine()
    engine.add("r", 14, [5, 6, 7, 8], computed=10)  # tokens 4..9 come from elsewhere
    engine.hook.blocks_loaded(engine.requests["r"], engine.get_block_ids("r"), 4, 6)
    (end,) = engine.schedule({"r": 4}, new=["r"]).ends
    assert (end.blocks, end.fills, end.tokens) == ((5, 8), (4, 2), 14)  # block 7 is half loaded
    engine.add("s", 8, [6, 7])
    (end,) = engine.schedule({"s": 8}, new=["s"]).ends
    assert end.blocks == (6, 7)


def test_copies_and_dropped_blocks_are_left_out():
    engine = Engine()
    engine.add("r", 12, [0, 6, 7], computed=9)
    copy = SimpleNamespace(src_block_id=4, dst_block_id=7)
    (end,) = engine.schedule({"r": 3}, new=["r"], copies=[copy]).ends
    assert end.blocks == (6,)  # 0 is vLLM's null block, 7 was copied


@pytest.mark.parametrize(("sampled", "left"), [(3, (5, 6)), (2, (5,)), (1, (5,))])
def test_rejected_drafts_spoil_their_blocks(sampled, left):
    engine = Engine()
    engine.add("a", 6, [5, 6], params=None, computed=5)
    engine.schedule({"a": 3}, new=["a"], drafts={"a": [1, 2]})  # tokens 5, 6, 7
    engine.receive(sampled=[[9] * sampled])
    engine.add("b", 9, [5, 6, 7], computed=8)
    (end,) = engine.schedule({"b": 1}, new=["b"]).ends
    assert end.blocks == (*left, 7)


@pytest.mark.parametrize(
    ("tokens", "drafts", "is_decode"),
    [
        ({"a": 1, "b": 1}, {}, True),
        ({"a": 1, "b": 2}, {}, False),
        ({"a": 3, "b": 1}, {"a": [1, 2]}, True),
        ({"a": 4, "b": 1}, {"a": [1, 2]}, False),
    ],
)
def test_a_decode_step_computes_one_token_per_request_and_its_drafts(tokens, drafts, is_decode):
    engine = Engine("decode")
    for name in tokens:
        engine.add(name, 8, [5, 6, 7], computed=8)
    step = engine.schedule(tokens, drafts=drafts)
    assert step.decode is is_decode
    assert (step.requests, step.kv_tokens) == (2, 16 if is_decode else 0)


def test_a_decode_worker_keeps_no_signatures():
    engine = Engine("decode")
    engine.add("r", 4, [5])
    assert engine.schedule({"r": 4}, new=["r"]).ends == ()


def test_an_empty_step_says_nothing():
    assert Engine().schedule({}) is None


def test_drafts_behind_a_prompts_last_token_leave_its_block_out():
    engine = Engine()
    engine.add("r", 5, [5, 6], computed=4)
    (end,) = engine.schedule({"r": 3}, new=["r"], drafts={"r": [-1, -1]}).ends
    assert (end.blocks, end.fills, end.tokens) == ((5,), (4,), 5)
    engine.add("s", 4, [7, 8], computed=3)  # on a border the drafts have a block of their own
    (end,) = engine.schedule({"s": 3}, new=["s"], drafts={"s": [-1, -1]}).ends
    assert (end.blocks, end.fills) == ((7,), (4,))


def test_after_a_fault_every_step_says_so_and_requests_are_answered():
    engine = Engine()
    engine.add("r", 4, [5])
    engine.hook._ends = lambda *_: 1 / 0
    assert engine.schedule({"r": 4}, new=["r"]).failed
    del engine.hook._ends
    assert engine.schedule({"r": 1}).failed
    assert engine.hook.failed
    engine.receive({"r": gathered(4)})
    assert engine.hook.finish(engine.requests["r"], {"remote_host": "h"}) == {"remote_host": "h"}
