"""The stages of a run, each of which adds what it found to the results."""

from __future__ import annotations

import torch

from profiling.gpu_check import audit, experts, parity, speed
from profiling.gpu_check.backends import OPS, REFERENCE, implementations
from profiling.gpu_check.clock import Budget
from profiling.gpu_check.device_timer import DeviceTimer, copy_bandwidth
from profiling.gpu_check.results import Results
from profiling.gpu_check.shapes import MODELS, Model

_CASE_SECONDS, _LAYER_SECONDS = 15, 30
_MEMORY_SHARE = 0.8


def check_backends(results: Results, budget: Budget) -> None:
    """Parity of every backend, the synchronisation check, and the captured pipeline."""
    device = torch.device("cuda")
    ops = {op: implementations(op) for op in OPS}
    checks = {"accumulate_hits": parity.check_accumulate, "decide": parity.check_decide}
    for op, found in ops.items():
        for name, implementation in found.items():
            if budget.allows(f"parity of {op}, {name}", _CASE_SECONDS):
                results.verdicts += checks[op](name, implementation, REFERENCE[op], device)
    for name in ops[OPS[0]]:
        if name == "torch":  # the reference reads back; it is not for hot paths
            continue
        mine = {op: found[name] for op, found in ops.items() if name in found}
        if budget.allows(f"audit of {name}", _CASE_SECONDS):
            results.verdicts += audit.check_synchronisation(name, mine, device)
            results.verdicts.append(audit.check_capture(name, mine, device))


def time_ops(results: Results, budget: Budget) -> None:
    """Copy bandwidth, then accumulate and decide at the models' shapes."""
    results.copy_bytes_per_s = copy_bandwidth()
    ops = {op: implementations(op) for op in OPS}
    for name, case in speed.cases(MODELS):
        if budget.allows(f"timing of {name}", _CASE_SECONDS):
            results.timings.append(case(DeviceTimer(), ops, torch.device("cuda")))
            torch.cuda.empty_cache()


def time_experts(results: Results, budget: Budget) -> None:
    """The fused layer of every model whose weights fit."""
    layer, name = experts.vllm_layer(), "vLLM fused_experts, bf16"
    if layer is None:
        layer, name = experts.grouped_layer, "torch grouped matrix products, bf16"
    for model in MODELS:
        if reason := _does_not_fit(model):
            results.left_out.append(reason)
        elif budget.allows(f"expert cost of {model.name}", _LAYER_SECONDS):
            device = torch.device("cuda")
            results.experts.append(experts.measure(DeviceTimer(), model, layer, name, device))
            torch.cuda.empty_cache()


def _does_not_fit(model: Model) -> str:
    needed, (free, _) = model.experts * model.expert_bytes, torch.cuda.mem_get_info()
    if needed <= _MEMORY_SHARE * free:
        return ""
    return f"expert cost of {model.name}: {needed / 2**30:.1f} GiB of weights do not fit"
