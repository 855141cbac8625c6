"""The stages of a run, each of which adds what it found to the results."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from profiling import nsys
from profiling.gpu_check import audit, experts, parity, speed
from profiling.gpu_check.backends import OPS, REFERENCE, implementations
from profiling.gpu_check.clock import Budget
from profiling.gpu_check.device_timer import DeviceTimer, copy_bandwidth
from profiling.gpu_check.parity import Verdict
from profiling.gpu_check.results import Results
from profiling.gpu_check.shapes import MODELS, Model
from profiling.verdict import CANNOT_TELL, FAIL

_CASE_SECONDS, _LAYER_SECONDS, _CAPTURE_SECONDS = 15, 30, 45
_MEMORY_SHARE = 0.8
DEVICE = torch.device("cuda")


def check_backends(results: Results, budget: Budget) -> None:
    """Parity of every backend, the synchronisation check, and the captured pipeline."""
    device = DEVICE
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


def audit_captures(results: Results, budget: Budget) -> None:
    """The same ops recorded by Nsight Systems, where it is installed, and the capture audited."""
    if not nsys.installed():
        results.left_out.append("audit of a capture: nsys is not on PATH")
        return
    for name in implementations(OPS[0]):
        if name == "torch" or not budget.allows(f"capture of {name}", _CAPTURE_SECONDS):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                checks = nsys.audited(
                    "profiling.nsys_ops", [name], Path(folder), 4 * _CAPTURE_SECONDS
                )
            except nsys.NsysError as error:
                results.left_out.append(f"audit of a capture of {name}: {error}")
                continue
        for check in checks:
            why = "; ".join(check.reasons)
            if check.verdict == CANNOT_TELL:
                results.left_out.append(f"capture of {name}, {check.name}: cannot tell: {why}")
            else:
                wrong = why if check.verdict == FAIL else ""
                results.verdicts.append(Verdict("pipeline", name, f"nsys {check.name}", wrong))


def time_ops(results: Results, budget: Budget) -> None:
    """Copy bandwidth, then accumulate and decide at the models' shapes."""
    results.copy_bytes_per_s = copy_bandwidth()
    ops = {op: implementations(op) for op in OPS}
    for name, case in speed.cases(MODELS):
        if budget.allows(f"timing of {name}", _CASE_SECONDS):
            results.timings.append(case(DeviceTimer(), ops, DEVICE))
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
            results.experts.append(experts.measure(DeviceTimer(), model, layer, name, DEVICE))
            torch.cuda.empty_cache()


def _does_not_fit(model: Model) -> str:
    needed, (free, _) = model.experts * model.expert_bytes, torch.cuda.mem_get_info()
    if needed <= _MEMORY_SHARE * free:
        return ""
    return f"expert cost of {model.name}: {needed / 2**30:.1f} GiB of weights do not fit"
