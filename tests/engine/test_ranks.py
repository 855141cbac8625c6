"""Tensor parallelism: two worker processes, of which the first reports what both of them routed."""

import json

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
from tests.engine.processes import python

pytestmark = pytest.mark.servers

SCRIPT = """
import json, os, sys
from pathlib import Path

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the workers


def watch(worker):
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    worker.seen = {}
    for module in worker.model_runner.model.modules():
        if isinstance(module, MoERunner):
            def record(ids, layer=module.layer_id, then=module.router.capture_fn):
                worker.seen.setdefault(layer, []).append(ids.cpu().clone())
                then(ids)
            module.router.set_capture_fn(record)


def take(worker):
    import torch

    seen = [torch.cat(worker.seen[layer]).tolist() for layer in sorted(worker.seen)]
    worker.seen.clear()
    return seen


def main():
    from eldr.engine.testing import families, inprocess
    from eldr.geometry import Geometry
    from eldr.signature import decode

    llm = inprocess.start(str(families.make("qwen3_moe", Path(sys.argv[1]))),
                          skip_tokenizer_init=True, enable_prefix_caching=False,
                          tensor_parallel_size=2, distributed_executor_backend="mp",
                          additional_config={"eldr": {"role": "both"}})
    import numpy as np
    from vllm import SamplingParams

    llm.collective_rpc(watch)
    info = llm.collective_rpc("eldr", args=("info",))
    geometry = Geometry(*(info[0]["geometry"][name] for name in ("layers", "experts", "top_k")))
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False,
                            extra_args={"kv_transfer_params": {"eldr": {"counts": True}}})
    same, exact = [], []
    for tokens in (1, 45, 250):
        prompt = {"prompt_token_ids": list(range(5, 5 + tokens))}
        (done,) = llm.generate([prompt], params, use_tqdm=False)
        found = decode(done.kv_transfer_params["eldr"], geometry)
        first, second = llm.collective_rpc(take)
        same.append(first == second and len(first[0]) == tokens)
        own = [np.bincount(np.ravel(ids), minlength=geometry.experts) for ids in first]
        exact.append(found.coverage == 1 and np.array_equal(found.counts, own))
    print(json.dumps({"same": same, "exact": exact, "reports": [i is not None for i in info]}))


if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(1600)
def test_both_ranks_route_alike_and_the_first_one_reports(tmp_path):
    script = tmp_path / "script.py"  # a file: the workers are spawned
    script.write_text(SCRIPT)
    done = python(script, tmp_path)
    line = next(text for text in done.stdout.splitlines() if text.startswith('{"same"'))
    found = json.loads(line)
    assert found == {"same": [True] * 3, "exact": [True] * 3, "reports": [True, False]}
