"""A real engine under a listening NVTX tool: every step's ranges, nested and complete."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
pytest.importorskip("nvtx")

from eldr.engine.testing.churn import Case
from tests.engine.processes import last_line, python
from tests.test_tracing import listener  # noqa: F401  # a fixture

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(1600)
def test_ranges_of_a_real_engine(listener):  # noqa: F811
    environment, out = listener
    out.unlink(missing_ok=True)
    case = json.dumps(asdict(Case("qwen3_moe", "v1", requests=8, seed=3)))
    done = python("-m", "eldr.engine.testing.churn", case, **environment, ELDR_NVTX="1")
    result = last_line(done)
    assert (result["mismatches"], result["outputs_equal"]) == (0, True)

    pushed, open_ranges = Counter(), []
    for line in out.read_text().splitlines():
        what, domain, *rest = line.split()
        if domain != "eldr":
            continue
        if what == "push":
            open_ranges.append(rest[0])
            pushed[rest[0]] += 1
        else:
            open_ranges.pop()
    assert open_ranges == []
    assert pushed["decide"] >= result["compared"] // 2  # several prompts may end in one step
    assert pushed["copy"] >= pushed["decide"]
    assert pushed["merge"] >= pushed["copy"]  # in the worker and in the scheduler
    assert pushed["accumulate"] > pushed["decide"]
    assert pushed["capture"] >= 4 * pushed["accumulate"]  # one per layer
    assert pushed["canary"] == -(-pushed["accumulate"] // 128)
