"""A report as one self-contained HTML page: no script, no request, readable in light and dark."""

from __future__ import annotations

from html import escape
from typing import Any

from profiling.markdown import SECTIONS, Columns

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --paper: #ffffff; --line: #dfe4ea;
  --soft: #f4f6f8; --engine: #b4bfcc; --eldr: #0b7a75; --copy: #7d8fb3; --out: #d9822b;
  --wait: #c23934; --good: #1b7f4b; --bad: #c23934; --doubt: #a86400; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --dim: #9aa6b4; --paper: #14181d;
  --line: #2c343d; --soft: #1c2229; --engine: #4b5866; --eldr: #35b8ae; --copy: #6f86b8;
  --out: #eba04e; --wait: #ec6a61; --good: #4fbf82; --bad: #ec6a61; --doubt: #e0a54a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 34px 0 10px; }
.name { color: var(--dim); margin: 2px 0 18px; overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: 3px 12px; border-radius: 5px; color: var(--paper);
  font-weight: 650; letter-spacing: .02em; }
.PASS { background: var(--good); } .FAIL { background: var(--bad); }
.CANNOT { background: var(--doubt); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--dim); font-size: 13px; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; } td.first { overflow-wrap: anywhere; }
.checks td:nth-child(2) { white-space: nowrap; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .doubt { color: var(--doubt); }
tr.ours td { background: color-mix(in srgb, var(--eldr) 9%, transparent); }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; min-width: 720px; }
.plot svg { max-width: 640px; min-width: 0; }
.grid { stroke: var(--line); stroke-width: 1; } .fit { stroke: var(--out); stroke-width: 2; }
.tick { fill: var(--dim); font-size: 11px; text-anchor: middle; }
.axis { fill: var(--dim); font-size: 11px; }
.label { fill: var(--paper); font-size: 11px; font-weight: 600; text-anchor: middle; }
.lane { fill: var(--dim); font-size: 12px; text-anchor: end; }
rect.engine { fill: var(--engine); } rect.eldr { fill: var(--eldr); }
rect.copy { fill: var(--copy); } rect.to-host { fill: var(--out); } rect.wait { fill: var(--wait); }
.dot { fill: var(--eldr); fill-opacity: .65; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; color: var(--dim); font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
ul { padding-left: 20px; color: var(--dim); }
"""
_LEGEND = (
    ("engine", "the engine's kernels and calls"),
    ("eldr", "ELDR's ranges and kernels"),
    ("wait", "host waits"),
    ("out", "copies to the host"),
    ("copy", "other copies"),
)
_TONE = {"PASS": "good", "FAIL": "bad", "CANNOT TELL": "doubt"}


def render(report: dict[str, Any], strip: str, scatter: str) -> str:
    """The page; `strip` and `scatter` are drawings, empty if there is nothing to draw."""
    audit = report["audit"]
    verdict = audit["verdict"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{verdict}: {escape(report['name'])}</title><style>{_STYLE}</style></head><body>",
        f'<h1><span class="verdict {verdict.split()[0]}">{verdict}</span></h1>',
        f'<p class="name">{escape(report["name"])}</p>',
        _checks(audit["checks"]),
    ]
    if strip:
        parts += [
            f"<h2>One step: {escape(report['strip'])}</h2>",
            '<p class="legend">'
            + "".join(f'<span><i style="background:var(--{c})"></i>{t}</span>' for c, t in _LEGEND)
            + f'</p><div class="scroll">{strip}</div>',
        ]
    for key, title, columns in SECTIONS:
        if report[key]:
            parts += [f"<h2>{title}</h2>", _table(report[key], columns)]
    if (decode := report["decode"]) is not None:
        parts += [
            f"<h2>Distinct experts against step time</h2><p>{escape(decode['sentence'])}</p>",
            f'<div class="plot">{scatter}</div>',
        ]
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in audit["limits"])
    return "\n".join([*parts, f"<h2>Limits</h2><ul>{limits}</ul></body></html>"]) + "\n"


def _checks(checks: list[dict[str, Any]]) -> str:
    rows = []
    for check in checks:
        why = "<br>".join(escape(reason) for reason in check["reasons"])
        tone = _TONE[check["verdict"]]
        rows.append(
            f'<tr><td>{check["name"]}</td><td class="{tone}">{check["verdict"]}</td>'
            f"<td>{why}</td></tr>"
        )
    head = "<tr><th>check</th><th>verdict</th><th>why</th></tr>"
    return f'<table class="checks">{head}{"".join(rows)}</table>'


def _table(rows: list[dict[str, Any]], columns: Columns) -> str:
    head = "".join(
        f"<th{'' if form == 's' else ' class=n'}>{heading}</th>" for _, heading, form in columns
    )
    body = []
    for row in rows:
        ours = ' class="ours"' if row.get("eldr") else ""
        cells = "".join(
            f'<td class="{"first" if form == "s" else "n"}">{escape(format(row[key], form))}</td>'
            for key, _, form in columns
        )
        body.append(f"<tr{ours}>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'
