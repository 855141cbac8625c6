"""Speculative decoding in a real engine: blocks in which drafts were rejected are left out."""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
from tests.engine.processes import last_line, python

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
from eldr.engine.testing import families, inprocess
from eldr.engine.testing.slotlog import SlotLog

drafts = {"method": "ngram", "num_speculative_tokens": 3,
          "prompt_lookup_min": 1, "prompt_lookup_max": 3}
llm = inprocess.start(str(families.make("qwen3_moe", Path(sys.argv[1]))), skip_tokenizer_init=True,
                      additional_config={"eldr": {"role": "both"}}, speculative_config=drafts)
import numpy as np
from vllm import SamplingParams
from eldr.signature import decode

worker, scheduler = inprocess.worker(llm).model_runner.eldr, inprocess.scheduler(llm).eldr
log, receive, outcome = SlotLog(llm), scheduler.receive, {"rejected": 0, "accepted": 0}


def watched(output, result):
    for name, drafts in output.scheduled_spec_decode_tokens.items():
        accepted = len(result.sampled_token_ids[result.req_id_to_index[name]]) - 1
        outcome["accepted"] += accepted
        outcome["rejected"] += len(drafts) - accepted
    receive(output, result)


scheduler.receive = watched
params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False,
                        extra_args={"kv_transfer_params": {"eldr": {"counts": True}}})
turns = []
for seed in range(3):
    prompt = np.random.default_rng(seed).integers(5, 12, 20).tolist()
    for _ in range(3):
        (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found = decode(done.kv_transfer_params["eldr"], worker.geometry)
        want = list(log.expected.values())[-1]
        wrong = int(np.abs(found.counts.astype(int) - want.counts).sum())
        turns.append([done.num_cached_tokens, found.coverage, want.coverage, wrong])
        prompt = prompt + list(done.outputs[0].token_ids) + [9]
counts = worker.decode()
print(json.dumps({"turns": turns, **outcome, **worker.counters()["signatures"],
                  "decode": [counts["steps"], counts["tokens"]]}))
"""


@pytest.mark.timeout(1600)
def test_a_next_turn_counts_no_block_in_which_a_draft_was_rejected(tmp_path):
    done = python("-c", SCRIPT, tmp_path)
    found = last_line(done)
    assert found["rejected"] > 50
    assert found["accepted"] > 0
    for cached, coverage, want, wrong in found["turns"]:
        assert (coverage, wrong) == (pytest.approx(want), 0)
        assert (coverage < 1) == (cached > 0)  # the blocks that decoding filled
    assert found["guarded_blocks"] == 0  # the scheduler knew every one of them
    steps, tokens = found["decode"]
    assert steps == tokens > 0  # a step with drafts is a decode step of one request
