"""The replayed requests are fixed by the configuration."""

from __future__ import annotations

import dataclasses

import pytest

from eldr.demo.config import DemoConfig
from eldr.demo.run import make_requests
from eldr.workload.tiny import load_prompts


def test_same_seed_same_requests() -> None:
    config = DemoConfig()
    assert make_requests(config) == make_requests(config)
    assert make_requests(config) != make_requests(dataclasses.replace(config, seed=2))


def test_prompts_are_held_out_and_used_once() -> None:
    requests = make_requests(DemoConfig())
    prompts = [r.prompt for r in requests]
    assert len(set(prompts)) == len(prompts) == 240
    assert not set(prompts) & {p.prompt for p in load_prompts("calibration")}
    assert {r.domain for r in requests} == {"legal", "code_py", "math", "med"}


def test_more_requests_than_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="100000 requests asked"):
        make_requests(DemoConfig(requests=100_000))


@pytest.mark.parametrize(
    "wrong",
    [{"requests": 0}, {"min_tokens": 1}, {"max_tokens": 10}, {"policies": ()},
     {"policies": ("a", "a")}],
)  # fmt: skip
def test_bad_configuration_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        DemoConfig(**wrong)
