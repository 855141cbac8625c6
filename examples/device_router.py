"""Decisions on the accelerator: signatures in, workers out, the host waits for nothing."""

import torch

from eldr.routing import DeviceRouter
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import load

device = "cuda" if torch.cuda.is_available() else "cpu"
trace = load(TRACE_PATH)  # your engine has these counts on the device already
router = DeviceRouter(trace.geometry, weights=[1.0, 1.0, 2.0], capacity=256, device=device)

batch = range(0, 64)
counts = torch.tensor(trace.prompt_counts[batch].astype("int32"), device=device)
tokens = torch.tensor(trace.cuts[batch] - trace.offsets[batch], device=device)
slots = torch.arange(len(batch), device=device)  # where each request lives until its release

workers = router.route(counts, tokens, slots, tokens)  # int64 [64], still on the device
print("requests by worker:", torch.bincount(workers, minlength=3).tolist())
router.release(slots)
print("running after release:", router.requests.tolist())
