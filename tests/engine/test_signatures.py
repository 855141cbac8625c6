"""The real thing: the patched vLLM on tiny models, one engine per process."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import eldr

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")

from eldr.engine.testing.churn import Case
from tests.engine.processes import last_line, python

pytestmark = pytest.mark.vllm


def churn(case):
    done = python("-m", "eldr.engine.testing.churn", json.dumps(asdict(case)))
    result = last_line(done)
    assert result["compared"] > case.requests // 2
    assert (result["mismatches"], result["coverage_lies"]) == (0, 0)
    assert result["outputs_equal"]
    return result["by_case"]


@pytest.mark.timeout(1600)
def test_runner_v1_sliding_windows_two_cache_groups_small_pool():
    seen = churn(Case("gpt_oss", "v1", requests=80, seed=2))
    assert seen["coverage_below_1"] == 0
    assert min(seen["prefix_hit"], seen["next_turn"], seen["twin"], seen["aborted"]) > 0
    assert seen["preemptions"] > 0


@pytest.mark.timeout(1600)
def test_runner_v2_beside_vllms_routed_experts():
    seen = churn(Case("olmoe", "v2", requests=24, seed=5, block_size=64, blocks=12, copies=True))
    assert seen["checked_with_routed_experts"] >= 10


@pytest.mark.timeout(1600)
def test_latent_attention_dense_first_layer_grouped_and_biased_topk():
    churn(Case("deepseek_v3", "v1", requests=30, seed=8, block_size=64, chunk=256, blocks=12))


@pytest.mark.timeout(1600)
def test_blocks_that_a_connector_brings_are_uncovered():
    seen = churn(Case("qwen3_moe", "v1", requests=60, seed=100, connector=True))
    assert seen["loaded_tokens"] > 0
    assert seen["coverage_below_1"] > 0


@pytest.mark.timeout(1600)
def test_the_host_store_gives_them_their_signature_back():
    case = Case("qwen3_moe", "v1", requests=60, seed=101, connector=True, store=True)
    seen = churn(case)
    assert seen["loaded_tokens"] > 0
    assert seen["coverage_below_1"] == 0


SERVE = """
import json, sys
from eldr.engine.testing import inprocess
llm = inprocess.start(sys.argv[1], "v1", max_num_batched_tokens=100,
                      additional_config={"eldr": json.loads(sys.argv[3])})
from vllm import SamplingParams
params = SamplingParams(temperature=0, max_tokens=1,
                        extra_args={"kv_transfer_params": {"eldr": {"counts": True}}})
prompts = [{"prompt_token_ids": json.loads(line)["token_ids"]} for line in open(sys.argv[2])]
print(json.dumps([o.kv_transfer_params["eldr"] for o in llm.generate(prompts, params)]))
"""


@pytest.mark.timeout(1600)
def test_served_signatures_equal_the_reference_of_another_engine(tmp_path):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 1000, n).tolist() for n in (1, 32, 45, 130, 300)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"token_ids": p}) + "\n" for p in prompts))
    model = str(Path(eldr.__file__).parent / "workload" / "tiny_moe")
    python("-m", "eldr.engine.reference", model, str(tmp_path / "p.jsonl"), str(tmp_path / "r.npz"))
    from eldr.geometry import Geometry
    from eldr.signature import Signature, encode

    reference = np.load(tmp_path / "r.npz", allow_pickle=False)
    geometry = Geometry(*map(int, reference["geometry"]))
    for form in ("exact", "sampled"):
        settings = json.dumps({"role": "prefill", "signature_form": form})
        payloads = last_line(python("-c", SERVE, model, str(tmp_path / "p.jsonl"), settings))
        assert len(payloads) == len(prompts)
        for payload, prompt, counts in zip(payloads, prompts, reference["counts"], strict=True):
            assert payload == encode(Signature(counts, len(prompt)), geometry, form)


@pytest.mark.timeout(1600)
def test_a_dense_model_is_refused_before_its_weights_are_loaded(tmp_path):
    script = """
import sys
from pathlib import Path
from eldr.engine.testing import families, inprocess
model = families.make("llama", Path(sys.argv[1]))
(model / "model.safetensors").unlink()
inprocess.start(str(model), additional_config={"eldr": {"role": "prefill"}})
"""
    done = python("-c", script, str(tmp_path), check=False)
    assert done.returncode != 0
    assert "has no routed experts" in done.stderr
