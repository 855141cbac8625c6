"""Faults injected into a real engine's hooks: every request is answered, and the metrics say it."""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
from tests.engine.processes import last_line, python

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
from eldr.engine.testing import families, inprocess

runner, folder = sys.argv[1], Path(sys.argv[2])
inprocess.prepare(runner)
from eldr.engine import cache, capture
from eldr.engine import scheduler as scheduler_module
if runner == "v2":  # the copies that CUDA graphs record, which can fail, unlike a reference
    capture.refers = lambda device: False
llm = inprocess.start(str(families.make("qwen3_moe", folder)), runner, skip_tokenizer_init=True,
                      additional_config={"eldr": {"role": "both"}})
from vllm import SamplingParams
from eldr.engine.metrics import render

worker, scheduler = inprocess.worker(llm).model_runner.eldr, inprocess.scheduler(llm).eldr
asks = {"kv_transfer_params": {"eldr": {"counts": True}}}
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False,
                        extra_args=asks)
prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 40, 90)]


class Broken:
    def fails(self, *args):
        raise RuntimeError("injected")
    __call__ = fails


class Answers(dict):  # breaks when an answer is taken out
    def pop(self, name, default=None):
        if name in self:
            raise RuntimeError("injected")
        return default


def serve():
    done = llm.generate(prompts, params, use_tqdm=False)
    assert all(o.finished and len(o.outputs[0].token_ids) == 4 for o in done)
    signed = [(o.kv_transfer_params or {}).get("eldr") is not None for o in done]
    return [list(o.outputs[0].token_ids) for o in done], signed


def failed():
    return "eldr_failed 1.0" in render(worker.counters()).decode().splitlines()


places = {
    "scheduler.build_metadata": (scheduler, "_admit"),
    "scheduler.receive": (scheduler_module, "_payload"),
    "scheduler.finish": (scheduler, "_ready"),
    "worker.after_forward": (worker._cache, "accumulate"),
    "worker.gather": (worker._cache, "gather"),
    "pending.enqueue_copy": (cache.GatheredOnDevice, "enqueue_copy"),
    "pending.result": (cache.GatheredOnDevice, "result"),
}
if runner == "v2":
    places["capture"] = (worker._ids, "store")
right, signed = serve()
assert all(signed) and not failed()
for name, (owner, attribute) in places.items():
    kept = getattr(owner, attribute)
    setattr(owner, attribute, Answers() if attribute == "_ready" else Broken())
    broken = serve()
    setattr(owner, attribute, kept)
    after = serve()  # the fault is over, ELDR stays off
    assert broken[0] == after[0] == right, name
    assert not any(broken[1] + after[1]), (name, broken[1], after[1])
    assert failed(), name
    scheduler.failed = worker.failed = worker._capture.failed = False
    for held in (scheduler._open, scheduler._awaited, scheduler._ready):
        held.clear()
    assert llm.reset_prefix_cache()
    again = serve()
    assert again[0] == right and all(again[1]) and not failed(), name
print(json.dumps(sorted(places)))
"""


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_fault_anywhere_costs_no_request_and_shows(runner, tmp_path):
    done = python("-c", SCRIPT, runner, tmp_path)
    places = last_line(done)
    assert len(places) == (8 if runner == "v2" else 7)
    calls = {place.rpartition(".")[2] for place in places} - {"gather"}  # within after_forward
    assert {
        call for call in calls if f"ELDR failed in {call}" in done.stdout + done.stderr
    } == calls
