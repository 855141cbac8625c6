"""On vLLM's own objects, without an engine: callbacks, refusals, layouts, what a start says.

In a process of its own, since it imports vLLM; each test looks at a part of what that found.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SCRIPT = """
import json, logging, sys
from pathlib import Path
from types import SimpleNamespace as Of

from eldr.engine.testing import families, inprocess

inprocess.prepare("v1")
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as theirs
from eldr.engine import capture
from eldr.engine.cache import SignatureCache
from eldr.engine.config import EngineConfig, EngineConfigError
from eldr.engine.layout import BlockLayout
from eldr.engine.worker import WorkerHook
from eldr.geometry import Geometry

found = {}


def callbacks():
    calls = []
    owner = Of(capture_fn=lambda ids: calls.append(("theirs", ids)))
    capture._chain_attribute(owner, lambda ids: calls.append(("ours", ids)))
    owner.capture_fn(1)
    # Bound again, after the KV cache was set up anew: ours is replaced, theirs stays.
    capture._chain_attribute(owner, lambda ids: calls.append(("new", ids)))
    owner.capture_fn(2)
    lonely = Of(capture_fn=None)
    capture._chain_attribute(lonely, lambda ids: calls.append(("alone", ids)))
    lonely.capture_fn(3)
    return calls


def hidden():
    layer = Of(layer_id=3, _quant_method=Of(moe_kernel=Of(impl=Of(fused_experts=object()))))
    try:
        capture._replaying(layer)
    except EngineConfigError as error:
        return str(error)


def vllm_config(**parallel):
    usual = {"data_parallel_size": 1, "data_parallel_rank": 0, "tensor_parallel_size": 1}
    return Of(
        model_config=Of(get_num_experts=lambda: 16, get_num_experts_per_tok=lambda: 2),
        parallel_config=Of(**{**usual, **parallel}),
        scheduler_config=Of(max_num_batched_tokens=8),
        compilation_config=Of(max_cudagraph_capture_size=None),
    )


def rebound():
    # The same engine's second capture takes the place of its first, in both of its forms.
    kinds = []
    for refers in (True, False):
        capture.refers = lambda device: refers
        owner = Of(capture_fn=None)
        first, second = (
            capture.ExpertCapture(vllm_config(), 1, torch.device("cpu")) for _ in range(2)
        )
        for one in (first, second):
            capture._chain_attribute(owner, one.callback(0))
        owner.capture_fn(torch.tensor([[5, 6]], dtype=torch.int32))
        if refers:
            found_first, found_second = (len(one.ids.step[0]) for one in (first, second))
            kinds.append([found_first, found_second])
        else:
            kinds.append([one.ids.of_step(1).tolist() for one in (first, second)])
    return kinds


def data_parallel():
    # Rank 1 of 2, with 2 of 5 tokens: rows of both ranks, or only of this one.
    one = capture.ExpertCapture(
        vllm_config(data_parallel_size=2, data_parallel_rank=1), 2, torch.device("cpu")
    )
    across = Of(num_tokens_across_dp_cpu=torch.tensor([3, 2]))
    theirs.get_forward_context = lambda: Of(dp_metadata=across)
    both = torch.arange(10, dtype=torch.int32).reshape(5, 2)
    one.callback(0)(both)
    one.callback(1)(both[:2] + 100)
    return [one.failed, one.ids.of_step(2).tolist()]


def start_up():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("vllm.eldr").addHandler(handler)
    logging.getLogger("vllm.eldr").setLevel(logging.INFO)
    # Qwen3-30B-A3B: 48 layers, 4 KV heads of 128, bfloat16; 128 experts, top-8.
    blocks, per_block = 500, 48 * 2 * 4 * 128 * 2 * 16
    bound = Of(device=torch.device("cpu"), geometry=Geometry(48, 128, 8), ids=None, failed=False)
    hook = WorkerHook(EngineConfig("prefill"), bound, BlockLayout(0, 16, blocks), True)
    hook._announce(Of(kv_cache_tensors=[Of(size=blocks * per_block)]))
    return [lines[-1], hook.info()["histogram_bytes"] / (blocks * per_block)]


def refused():
    model = str(families.make("qwen3_moe", Path(sys.argv[1])))
    cases = {
        "pipeline": {"pipeline_parallel_size": 2},
        "context": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        "micro": {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
        "compiled": {"enforce_eager": False},
    }
    said = {}
    for name, case in cases.items():
        for on in (True, False):
            arguments = {"skip_tokenizer_init": True, "enforce_eager": True, **case}
            additional = {"eldr": {"role": "both"}} if on else {}
            try:
                EngineArgs(
                    model=model, additional_config=additional, **arguments
                ).create_engine_config()
                said[name, on] = "accepted"
            except ValueError as error:
                said[name, on] = str(error).splitlines()[1].split(" [type=")[0].strip()
    return [[*key, text] for key, text in said.items()]


for part in (callbacks, hidden, rebound, data_parallel, start_up, refused):
    found[part.__name__] = part()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("model"))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_two_capture_users_keep_each_other(found):
    first, again, alone = found["callbacks"][:2], found["callbacks"][2:4], found["callbacks"][4:]
    assert first == [["theirs", 1], ["ours", 1]]
    assert again == [["theirs", 2], ["new", 2]]
    assert alone == [["alone", 3]]


def test_a_second_capture_of_ours_takes_the_place_of_the_first(found):
    referred, copied = found["rebound"]
    assert referred == [0, 1]
    assert copied == [[[[-1, -1]]], [[[5, 6]]]]


def test_a_kernel_that_routes_out_of_sight_is_refused_with_the_flag_that_works(found):
    assert "layer 3" in found["hidden"]
    assert "--moe-backend marlin" in found["hidden"]


def test_with_data_parallelism_only_this_ranks_rows_are_taken(found):
    failed, rows = found["data_parallel"]
    assert not failed
    assert rows == [[[6, 7], [100, 101]], [[8, 9], [102, 103]]]


def test_a_start_says_geometry_and_memory_and_that_is_below_its_bound(found):
    line, share = found["start_up"]
    assert "48 layers x 128 experts, top-8" in line
    assert "500 histograms of 16-token blocks, 2.9 MiB, 0.39 % of the KV cache" in line
    assert share <= 0.004


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pipeline", "does not support pipeline parallelism"),
        ("context", "does not support decode context parallelism"),
        ("micro", "does not support micro-batching"),
        ("compiled", "cannot see routing that torch.compile traced"),
    ],
)
def test_vllms_configuration_is_refused_in_one_sentence_that_names_the_flag(found, name, sentence):
    said = {(case, on): text for case, on, text in found["refused"]}
    assert said[name, False] == "accepted"  # by vLLM itself
    assert said[name, True].startswith(f"Value error, ELDR {sentence}")
    assert "--" in said[name, True]
