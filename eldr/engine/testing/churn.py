"""Randomised traffic through one real engine, every signature compared with a reference.

    python -m eldr.engine.testing.churn '{"family": "qwen3_moe", "runner": "v1", ...}'

runs one case in this process and prints one JSON object; `benchmarks/churn.py` runs many.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eldr.engine.testing import families, inprocess, plan
from eldr.engine.testing.slotlog import SlotLog
from eldr.geometry import Geometry
from eldr.signature import decode

MAX_LEN = 384
_WHOLE = 16 * MAX_LEN  # tokens per step, so that no prompt is cut
_REFERENCE_BLOCK = 16  # the only size of vLLM's reference latent attention


@dataclass(frozen=True, slots=True)
class Case:
    """One engine and its traffic.

    Attributes:
        family: of `families.MOE`.
        runner: vLLM's model runner, `v1` or `v2`.
        requests: how many to send.
        seed: of the traffic.
        block_size: tokens per KV block.
        chunk: tokens per step at most; prompts longer than this arrive in chunks. Not used
            with latent attention on a CPU without AMX, where vLLM does not chunk.
        blocks: KV blocks in the pool per cache group; little more than the longest request
            needs forces eviction and preemption.
        connector: whether evicted prefixes come back through a KV connector.
        store: whether a host store, large enough for everything, keeps their rows.
        copies: whether ids are copied inside the forward, as beside CUDA graphs, or the routers'
            own tensors are kept, as on a CPU.
        speculate: draft tokens per step, looked up in the request's own tokens.
    """

    family: str
    runner: str
    requests: int
    seed: int
    block_size: int = 32
    chunk: int = 200
    blocks: int = 18
    connector: bool = False
    store: bool = False
    copies: bool = False
    speculate: int = 0


def run(case: Case, folder: Path) -> dict[str, Any]:
    """The case's counts; see `summary` for their meaning."""
    inprocess.prepare(case.runner)
    if case.copies:
        _copy_ids()
    llm = _start(case, folder)
    hook = inprocess.worker(llm).model_runner.eldr
    log = SlotLog(llm, remembers=case.store)
    traffic = plan.make(random.Random(case.seed), case.requests, case.block_size, MAX_LEN)
    with_eldr = plan.drive(llm, traffic)
    geometry = hook._capture.geometry
    result = _compare(case, with_eldr, log, geometry)
    switch_off(llm)
    without = plan.drive(llm, traffic)
    different = [
        name
        for name, done in with_eldr.items()
        if not done.aborted and done.tokens != without[name].tokens
    ]
    result["outputs_equal"] = not different
    result["outputs_different"] = len(different)
    return result


def _copy_ids() -> None:
    from eldr.engine import capture

    capture.refers = lambda device: False


def switch_off(llm: Any) -> None:
    """Leaves the engine as if ELDR had never been configured, with an empty prefix cache."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runner = inprocess.worker(llm).model_runner
    runner.eldr = inprocess.scheduler(llm).eldr = None
    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(None)
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache is still in use")


def _start(case: Case, folder: Path) -> Any:
    extra: dict[str, Any] = {}
    reference = families.reference_latent_attention(case.family)
    block_size = _REFERENCE_BLOCK if reference else case.block_size
    store = {"host_store_blocks": 4096} if case.store else {}
    if case.connector:
        extra["kv_transfer_config"] = {
            "kv_connector": "BlockMemory",
            "kv_connector_module_path": "eldr.engine.testing.connector",
            "kv_role": "kv_both",
        }
    elif case.runner == "v2" and not reference:  # vLLM wants prefix caching with it
        extra["enable_return_routed_experts"] = True
    if case.speculate:
        extra["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": case.speculate,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    return inprocess.start(
        str(families.make(case.family, folder)),
        case.runner,
        skip_tokenizer_init=True,
        block_size=block_size,
        max_model_len=MAX_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=_WHOLE if reference else case.chunk,
        num_gpu_blocks_override=case.blocks
        * families.cache_groups(case.family)
        * (case.block_size // block_size),
        additional_config={"eldr": {"role": "both", **store}},
        **extra,
    )


def _compare(
    case: Case, done: dict[str, plan.Done], log: SlotLog, geometry: Geometry
) -> dict[str, Any]:
    expected = {name.rsplit(plan.MARK, 1)[0]: found for name, found in log.expected.items()}
    mismatches = lies = compared = 0
    cases: Counter[str] = Counter(preemptions=log.preemptions, loaded_tokens=log.loaded_tokens)
    for name, request in done.items():
        cases.update(request.kinds)
        if request.aborted or not request.asked:
            continue
        compared += 1
        found = decode(request.signature, geometry)
        want = expected[name]
        mismatches += int(np.abs(found.counts.astype(np.int64) - want.counts).sum())
        lies += abs(found.coverage - want.coverage) > 1e-9
        cases["coverage_below_1"] += found.coverage < 1
        if request.routed is not None and found.coverage == 1:
            if _routed_alike(request.routed, found.counts):
                cases["checked_with_routed_experts"] += 1
            else:
                cases["routed_experts_of_another_computation"] += 1
                layers = found.counts.shape[0]
                mismatches += log.foreign(want.prefixes, request.routed[:, -layers:])
    return {
        **asdict(case),
        "compared": compared,
        "mismatches": mismatches,
        "coverage_lies": lies,
        "by_case": dict(sorted(cases.items())),
    }


def _routed_alike(routed: Any, counts: Any) -> bool:
    """Whether vLLM's own ids [tokens, all layers, K] count the same; dense layers are first."""
    layers, experts = counts.shape
    ids = routed[:, -layers:]
    own = np.stack([np.bincount(ids[:, n].ravel(), minlength=experts) for n in range(layers)])
    return np.array_equal(own, counts)


def main() -> int:
    """Runs the case given as JSON and prints its result."""
    case = Case(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(case, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
