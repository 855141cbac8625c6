"""The whole chain in real processes: vLLM prefill and decode workers, NIXL, and the router."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.run import run_demo

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1500)]

_POLICIES = ("least_requests", "locality_band")


def test_outputs_equal_and_nothing_recomputed(tmp_path: Path) -> None:
    config = DemoConfig(
        out=tmp_path,
        requests=24,
        concurrency=8,
        decode_workers=2,
        policies=_POLICIES,
        output_checks=8,
        start_timeout=900.0,
    )
    run_demo(config, Console())
    summary = json.loads((tmp_path / "summary.json").read_text())
    checks = summary["checks"]
    assert checks["outputs_equal"]
    assert checks["outputs_compared"] == 8
    assert checks["prompt_tokens_recomputed"] == 0
    assert checks["prompt_tokens_transferred"] > 0
    assert checks["signatures_compared"] == 32
    assert checks["signature_mismatches"] == 0
    assert set(summary["policies"]) == set(_POLICIES)
    for figures in summary["policies"].values():
        assert 4 <= figures["distinct_per_step"] <= 64
        assert figures["tpot_ms"]["p50"] > 0
        assert figures["max_over_mean_load"] >= 1
    for policy in _POLICIES:
        page = (tmp_path / f"operator-{policy}.html").read_text()
        assert '"decisions_total":24' in page
    for name in ("distinct.png", "heatmap.png"):
        assert (tmp_path / name).stat().st_size > 10_000
