"""docs/scale.md and docs/simulation.md say what the committed results say."""

from __future__ import annotations

import pytest

from benchmarks import simulation_docs, simulation_scale
from benchmarks.figures import ROOT, result


@pytest.mark.parametrize("path", simulation_docs.PAGES)
def test_figures_are_those_of_the_results(path):
    """If not: run `python -m benchmarks.simulation_docs`."""
    page = (ROOT / path).read_text(encoding="utf-8")
    assert simulation_docs.render(page, simulation_docs.PAGES[path]) == page


def test_a_changed_figure_is_found():
    path = "docs/scale.md"
    figures = simulation_docs.PAGES[path]
    page = (ROOT / path).read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| 4 |"))
    assert simulation_docs.render(page.replace(row, row.replace("|", "| 1", 2)), figures) == page
    with pytest.raises(ValueError, match="places for"):
        simulation_docs.render(page.replace("figures: runs", "figures: other"), figures)


def test_the_benchmark_shows_the_parts_that_were_run():
    out = result("simulation_scale")
    assert simulation_docs.decisions(out) in simulation_scale.tables(out)
    some = simulation_scale.tables({"discrete": out["discrete"]})
    assert "5 policies" in some
    assert "router" not in some
