"""Expert load balancing moves experts to other places; signatures keep the model's own numbers.

vLLM refuses EPLB on a CPU, so its state is put in by hand, in a real engine: physical experts are a
permutation of the logical ones, weights included, and vLLM's routers map to them.
"""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
from tests.engine.processes import last_line, python

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
from eldr.engine.testing import families, inprocess

llm = inprocess.start(str(families.make("qwen3_moe", Path(sys.argv[1]))), skip_tokenizer_init=True,
                      enable_prefix_caching=False,
                      additional_config={"eldr": {"role": "both"}})
import torch
from vllm import SamplingParams
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router import base_router
from eldr.signature import decode

runner = inprocess.worker(llm).model_runner
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False,
                        extra_args={"kv_transfer_params": {"eldr": {"counts": True}}})
prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 33, 120)]
seen = []


def serve():
    before = runner.eldr.decode()["distinct"]
    done = llm.generate(prompts, params, use_tqdm=False)
    after = runner.eldr.decode()["distinct"]
    return (
        [list(o.outputs[0].token_ids) for o in done],
        [decode(o.kv_transfer_params["eldr"], runner.eldr.geometry).counts.tolist() for o in done],
        [b - a for a, b in zip(before, after)],
    )


def mapped(topk_ids, expert_load_view, logical_to_physical_map, **rest):
    physical = logical_to_physical_map[topk_ids.long(), 0].to(topk_ids.dtype)
    seen.append(bool((physical != topk_ids).any()))
    return physical


right = serve()
base_router.eplb_map_to_physical_and_record = mapped  # vLLM's own is a Triton kernel
for index, module in enumerate(m for m in runner.model.modules() if isinstance(m, MoERunner)):
    experts = runner.eldr.geometry.experts
    place = torch.randperm(experts, generator=torch.Generator().manual_seed(index))
    for name, weight in module.routed_experts.named_parameters():
        assert weight.shape[0] == experts, name
        weight.data[place] = weight.data.clone()
    module.router.eplb_state = EplbLayerState(
        expert_load_view=torch.zeros(experts, dtype=torch.int32),
        logical_to_physical_map=place[:, None],
        logical_replica_count=torch.ones(experts, dtype=torch.int64),
        should_record_tensor=torch.zeros(1, dtype=torch.int32),
        num_unpadded_tokens_tensors=[torch.zeros(1, dtype=torch.int32)],
    )
balanced = serve()
assert seen and all(seen[:4])
print(json.dumps([a == b for a, b in zip(right, balanced)]))
"""


@pytest.mark.timeout(1600)
def test_signatures_and_decode_counts_name_logical_experts(tmp_path):
    done = python("-c", SCRIPT, tmp_path)
    outputs, signatures, distinct = last_line(done)
    assert outputs  # the weights really moved along
    assert signatures
    assert distinct
