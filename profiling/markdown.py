"""A report as Markdown."""

from __future__ import annotations

from typing import Any

# Table columns: (key in the row, heading, format)
Columns = tuple[tuple[str, str, str], ...]
RANGES: Columns = (
    ("range", "range", "s"),
    ("count", "count", ",d"),
    ("host_ms", "host ms", ",.2f"),
    ("host_us_p50", "host us p50", ",.1f"),
    ("host_us_p99", "p99", ",.1f"),
    ("device_ms", "device ms", ",.3f"),
)
KERNELS: Columns = (
    ("kernel", "kernel", "s"),
    ("count", "launches", ",d"),
    ("eldr", "of ELDR", ",d"),
    ("total_ms", "total ms", ",.2f"),
    ("mean_us", "mean us", ",.2f"),
    ("longest_us", "longest us", ",.1f"),
    ("share", "share", ".3%"),
)
STEPS: Columns = (
    ("kind", "kind", "s"),
    ("count", "steps", ",d"),
    ("ms_p50", "ms p50", ",.3f"),
    ("ms_p99", "ms p99", ",.3f"),
)
COPIES: Columns = (
    ("kind", "kind", "s"),
    ("count", "copies", ",d"),
    ("bytes", "bytes", ",d"),
    ("ms", "device ms", ",.2f"),
)
SECTIONS: tuple[tuple[str, str, Columns], ...] = (
    ("ranges", "Time per range", RANGES),
    ("kernels", "Kernels", KERNELS),
    ("steps", "Steps", STEPS),
    ("copies", "Copies", COPIES),
)


def render(report: dict[str, Any]) -> str:
    """The whole report."""
    audit = report["audit"]
    lines = [f"# {audit['verdict']}: {report['name']}", ""]
    lines += ["| check | verdict | why |", "|---|---|---|"]
    for check in audit["checks"]:
        why = "<br>".join(_escape(reason) for reason in check["reasons"])
        lines.append(f"| {check['name']} | {check['verdict']} | {why} |")
    for key, title, columns in SECTIONS:
        if report[key]:
            lines += ["", f"## {title}", "", *_table(report[key], columns)]
    if (decode := report["decode"]) is not None:
        lines += ["", "## Distinct experts against step time", "", decode["sentence"]]
    lines += ["", "## Limits", "", *(f"- {limit}" for limit in audit["limits"])]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]], columns: Columns) -> list[str]:
    lines = ["| " + " | ".join(heading for _, heading, _ in columns) + " |"]
    lines.append("|" + "|".join("---" if form == "s" else "---:" for _, _, form in columns) + "|")
    for row in rows:
        cells = (_escape(format(row[key], form)) for key, _, form in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
