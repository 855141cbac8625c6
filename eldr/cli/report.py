"""`eldr report`: the operator page as one HTML file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from eldr.cli import CANNOT_TELL, DONE
from eldr.cli.router_client import RouterError, get_json, is_url

_EPILOG = """\
RUN.jsonl is the decision log of a router (eldr serve --decision-log RUN.jsonl): decisions,
outcomes, and every --decision-log-counters seconds what the decode workers counted. The page
needs no network and no other file. A router's admin key comes from ELDR_SERVE_ADMIN_KEY.

examples:
  eldr report decisions.jsonl -o report.html
  eldr report http://127.0.0.1:30000 -o report.html
  eldr report decisions.jsonl -o report.html --json

exit codes: 0 written, 2 usage, 3 the log or the router cannot be read, or the file not written
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = _EPILOG
    parser.add_argument("source", metavar="RUN.jsonl|URL", help="a decision log, or a router")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="HTML file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    from eldr.serving.page.render import page

    try:
        data = _data(args.source)
        html = page(data)
        # All of it or nothing: a reader never meets half a page.
        part = Path(args.output + ".part")
        part.write_text(html, encoding="utf-8")
        os.replace(part, args.output)
    except (RouterError, OSError, ValueError) as error:
        print(f"eldr report: {error}", file=sys.stderr)
        return CANNOT_TELL
    size = len(html.encode())
    if args.json:
        out = {"v": 1, "output": args.output, "bytes": size, "decisions": data["decisions_total"]}
        print(json.dumps(out | {"numbers": data["numbers"]}))
    else:
        print(f"wrote {args.output}: {data['decisions_total']} decisions, {size / 1000:.0f} kB")
    return DONE


def _data(source: str) -> dict[str, Any]:
    from eldr.serving.page.build import VERSION, from_log

    if not is_url(source):
        from eldr.serving.decision_log import read_log

        return from_log(read_log(source), os.path.basename(source))
    data = get_json(source, "/eldr/data")
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise RouterError(f"{source}: not a page of a version that this eldr reads ({VERSION})")
    data["source"]["kind"] = "snapshot"
    return data
