"""Capture callbacks side by side; in a process of its own, since it imports vLLM."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SCRIPT = """
from types import SimpleNamespace as Of
from eldr.engine import capture
from eldr.engine.config import EngineConfigError

calls = []
owner = Of(capture_fn=lambda ids: calls.append(("theirs", ids)))
capture._chain_attribute(owner, lambda ids: calls.append(("ours", ids)))
owner.capture_fn(1)
assert calls == [("theirs", 1), ("ours", 1)], calls

calls.clear()  # bound again, after the KV cache was set up anew: ours is replaced, theirs stays
capture._chain_attribute(owner, lambda ids: calls.append(("new", ids)))
owner.capture_fn(2)
assert calls == [("theirs", 2), ("new", 2)], calls

lonely = Of(capture_fn=None)
capture._chain_attribute(lonely, calls.append)
lonely.capture_fn(3)
assert calls[-1] == 3, calls

hidden = Of(layer_id=3, _quant_method=Of(moe_kernel=Of(impl=Of(fused_experts=object()))))
try:
    capture._replaying(hidden)
except EngineConfigError as error:
    assert "layer 3" in str(error) and "--moe-backend marlin" in str(error), error
else:
    raise AssertionError("a kernel that routes out of sight was accepted")
"""


@pytest.mark.timeout(900)
def test_callbacks_keep_each_other_and_hidden_routing_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
