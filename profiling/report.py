"""A capture as a report: Markdown, JSON and one self-contained HTML page.

    python -m profiling.report CAPTURE.sqlite --out DIR [--baseline UNPATCHED.sqlite]
                               [--decode-log LOG.jsonl]

It includes the audit; the exit code is the audit's: 0 PASS, 1 FAIL, 2 usage, 3 CANNOT TELL.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

from profiling import decode_log, html_page, markdown, summary, svg, timeline
from profiling.audit import Options, as_json, audit
from profiling.decode_log import DecodeLogError, Point
from profiling.export import Export, ExportError
from profiling.verdict import CANNOT_TELL, EXIT_CODES


def build(
    export: Export, baseline: Export | None, points: list[Point] | None
) -> tuple[dict[str, Any], str, str, int]:
    """The report's data, the strip and the scatter plot as SVG, and the exit code."""
    verdict, facts = audit(export, baseline, Options())
    strip = timeline.strip(export, facts)
    report = {
        "name": export.path.name,
        "audit": as_json(export.path, verdict, facts),
        "strip": strip.title if strip else None,
        "ranges": summary.range_rows(facts),
        "kernels": summary.kernel_rows(facts),
        "steps": summary.step_rows(facts),
        "copies": summary.copy_rows(export),
        "decode": _decode(points) if points else None,
    }
    closer = timeline.zoom(strip) if strip else None
    drawn = "".join(svg.step_strip(part) for part in (strip, closer) if part)
    plot = svg.scatter(points, decode_log.fit(points)) if points else ""
    return report, drawn, plot, verdict.exit_code


def _decode(points: list[Point]) -> dict[str, Any]:
    fit, steps = decode_log.fit(points), sum(p.steps for p in points)
    if fit is None:
        sentence = f"{len(points)} intervals of {steps} steps do not spread enough for a line."
    else:
        sentence = (
            f"{steps} decode steps in {len(points)} intervals: each further distinct expert per "
            f"layer goes with {1e3 * fit.slope:.1f} us more per step (correlation "
            f"{fit.correlation:.2f}). Batch size varies along with it: no proof of a cause."
        )
    return {
        "sentence": sentence,
        "slope_ms": fit.slope if fit else None,
        "base_ms": fit.base if fit else None,
        "correlation": fit.correlation if fit else None,
        "points": [
            {"distinct": p.distinct, "ms": p.milliseconds, "tokens": p.tokens, "steps": p.steps}
            for p in points
        ],
    }


def write(out: Path, report: dict[str, Any], strip: str, plot: str) -> list[Path]:
    """Writes report.md, report.json and report.html; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": markdown.render(report),
        "report.json": json.dumps(report, indent=1) + "\n",
        "report.html": html_page.render(report, strip, plot),
    }
    for name, text in texts.items():
        (out / name).write_text(text, "utf-8")
    return [out / name for name in texts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("export", type=Path, help="sqlite export of the capture")
    parser.add_argument("--baseline", type=Path, help="the same load on the engine without ELDR")
    parser.add_argument("--decode-log", type=Path, help="snapshots of /eldr/decode, one per line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Writes one report; prints the files' paths."""
    args = _parser().parse_args(argv)
    try:
        points = decode_log.read(args.decode_log) if args.decode_log else None
        baseline = Export(args.baseline) if args.baseline else None
        report, strip, plot, code = build(Export(args.export), baseline, points)
    except DecodeLogError as error:
        print(f"profiling.report: {error}", file=sys.stderr)
        return 2
    except (ExportError, sqlite3.DatabaseError) as error:
        print(f"profiling.report: {error}", file=sys.stderr)
        return EXIT_CODES[CANNOT_TELL]
    for path in write(args.out, report, strip, plot):
        print(path)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
