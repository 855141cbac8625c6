"""Copy-on-write partial prefix hits, which vLLM makes for hybrid models with aligned Mamba states.

The hit ends inside a block: vLLM copies that block, and its copy is left out of the signature.
"""

import pytest

from tests.engine.processes import last_line, python

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()),
        reason="vLLM's linear attention on a CPU needs AMX or AVX-512 BF16",
    ),
]

SCRIPT = """
import json, sys
from pathlib import Path
from eldr.engine.testing import inprocess

inprocess.prepare("v1")
import torch, transformers

config = transformers.Qwen3NextConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, intermediate_size=128, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    num_experts=16, num_experts_per_tok=4, max_position_embeddings=4096,
    layer_types=["linear_attention"] * 3 + ["full_attention"], bos_token_id=1, eos_token_id=2,
    pad_token_id=0, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[])
torch.manual_seed(1)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
llm = inprocess.start(sys.argv[1], skip_tokenizer_init=True, max_model_len=4096,
                      max_num_batched_tokens=4096, num_gpu_blocks_override=64,
                      enable_prefix_caching=True, mamba_cache_mode="align", prefix_match_unit=32,
                      additional_config={"eldr": {"role": "both"}})
import numpy as np
from vllm import SamplingParams
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from eldr.signature import decode

runner, scheduler = inprocess.worker(llm).model_runner, inprocess.scheduler(llm)
seen = {}
for module in runner.model.modules():
    if isinstance(module, MoERunner):
        def record(ids, layer=module.layer_id, then=module.router.capture_fn):
            seen.setdefault(layer, []).append(ids.clone())
            then(ids)
        module.router.set_capture_fn(record)
params = SamplingParams(temperature=0, max_tokens=1, detokenize=False,
                        extra_args={"kv_transfer_params": {"eldr": {"counts": True}}})


def serve(prompt):
    seen.clear()
    (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    found = decode(done.kv_transfer_params["eldr"], runner.eldr.geometry)
    ids = torch.stack([torch.cat(seen[layer]) for layer in sorted(seen)], dim=1)
    return done.num_cached_tokens, found, ids


def counted(ids):
    return torch.stack([torch.bincount(ids[:, n].ravel().long(), minlength=16)
                        for n in range(ids.shape[1])])


size = scheduler.eldr._layout.block_size
rng = np.random.default_rng(0)
first = rng.integers(5, 500, size + size // 2).tolist()
_, whole, ids = serve(first)
fresh = bool(whole.coverage == 1 and (counted(ids).numpy() == whole.counts).all())
second = first + rng.integers(5, 500, size).tolist()
cached, found, rest = serve(second)
# Covered: the first block, which the first prompt computed, and all behind the copied one.
kept = torch.cat([ids[:size], rest[2 * size - cached :]])
print(json.dumps({
    "partial": scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits,
    "fresh": fresh, "size": size, "cached": cached, "tokens": len(second),
    "coverage": found.coverage, "kept": len(kept),
    "equal": bool((counted(kept).numpy() == found.counts).all()),
    "guarded": runner.eldr.counters()["signatures"]["guarded_blocks"]}))
"""


@pytest.mark.timeout(1600)
def test_the_copy_of_a_block_is_left_out_and_all_else_is_exact(tmp_path):
    done = python("-c", SCRIPT, tmp_path)
    found = last_line(done)
    assert found["partial"]
    assert found["fresh"]
    assert found["size"] < found["cached"] < 2 * found["size"]  # the hit ends inside a block
    assert found["coverage"] == pytest.approx(found["kept"] / found["tokens"])
    assert found["coverage"] < 1
    assert found["equal"]
    assert found["guarded"] == 0  # the scheduler knew of the copy
