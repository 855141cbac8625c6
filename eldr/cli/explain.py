"""`eldr explain`: why a request went to its worker."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from eldr.cli import CANNOT_TELL, DONE, NO, USAGE
from eldr.cli.router_client import RouterError, get_json, is_url

_EPILOG = """\
FROM is a running router or a decision log (eldr serve --decision-log FILE), of which the older
files FILE.1, FILE.2 and so on are read as well. A router's admin key comes from
ELDR_SERVE_ADMIN_KEY. The request id is the client's X-Request-Id, or the one that the router gave.
Of several decisions for one id (retries), the last one is explained.

examples:
  eldr explain --last --from http://127.0.0.1:30000
  eldr explain chatcmpl-42 --from decisions.jsonl
  eldr explain chatcmpl-42 --from decisions.jsonl --json | jq .explanation.sentence

exit codes: 0 explained, 1 no such decision, 2 usage, 3 the router or the file cannot be read
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = _EPILOG
    parser.add_argument("request", nargs="?", metavar="REQUEST_ID", help="the request to explain")
    parser.add_argument("--last", action="store_true", help="explain the newest decision")
    parser.add_argument(
        "--from",
        dest="source",
        default="http://127.0.0.1:30000",
        metavar="FROM",
        help="URL of a router's operator surface, or a decision log (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Finds the decision and explains it."""
    if (args.request is None) == (not args.last):
        print("eldr explain: give a REQUEST_ID or --last", file=sys.stderr)
        return USAGE
    from eldr.serving.page.explanation import explanation

    try:
        row = _find(args.source, args.request)
        if row is None:
            what = "there is no decision" if args.last else f"no decision for {args.request!r}"
            print(f"eldr explain: {what} in {args.source}{_hint(args.source)}", file=sys.stderr)
            return NO
        explained = explanation(row)
    except (RouterError, OSError, ValueError) as error:
        print(f"eldr explain: {error}", file=sys.stderr)
        return CANNOT_TELL
    if args.json:
        kept = {key: value for key, value in row.items() if key != "signature"}
        print(json.dumps({"v": 1, "decision": kept, "explanation": explained}))
    else:
        print(text(row, explained))
    return DONE


def _hint(source: str) -> str:
    if is_url(source):
        return "; a router remembers its last --decision-buffer decisions only"
    return "; a request is logged when it ends, and only if it is in --decision-log-sample"


def _find(source: str, request: str | None) -> dict[str, Any] | None:
    found = None
    for row in _rows(source, request):
        wanted = request is None or row.get("request_id") == request
        # A log has the requests in the order in which they ended.
        if wanted and (found is None or row.get("time", 0.0) >= found.get("time", 0.0)):
            found = row
    return found


def _rows(source: str, request: str | None) -> Iterator[dict[str, Any]]:
    """Decisions, oldest first."""
    if not is_url(source):
        from eldr.serving.decision_log import files_of, read_decisions

        for file in files_of(source):
            yield from read_decisions(file)
        return
    limit = 1 if request is None else 1_000_000
    answer = get_json(source, f"/eldr/decisions?limit={limit}")
    try:
        yield from reversed(answer["decisions"])
    except (KeyError, TypeError) as error:
        raise RouterError(f"{source}: not the answer of an ELDR router") from error


def text(row: dict[str, Any], explained: dict[str, Any]) -> str:
    """The explanation for a terminal; control characters of strangers are escaped."""
    facts = [("request", row.get("request_id")), ("worker", row["worker"])]
    facts += [("policy", row["policy"]), ("branch", row["branch"]), ("reason", row["reason"])]
    facts += [(k, row.get(k)) for k in ("arm", "prefill_worker", "prompt_tokens", "coverage")]
    facts += [(k, row.get(k)) for k in ("added_experts", "decision_us", "outcome")]
    lines = [safe(explained["sentence"]), ""]
    lines += [f"{name:15s} {safe(_shown(v))}" for name, v in facts if v is not None]
    return "\n".join([*lines, "", *_table(explained), "", f"score: {explained['meaning']}"])


def _table(explained: dict[str, Any]) -> list[str]:
    rows = [["", "worker", "score", "in band", "running", "shadows that agree"]]
    for c in explained["candidates"]:
        score = c["why_not"] or ("-" if c["score"] is None else f"{c['score']:.4g}")
        band = "-" if c["band"] is None else "yes" if c["band"] else "no"
        load = "-" if c["load"] is None else str(c["load"])
        mark = "*" if c["chosen"] else ""
        rows.append([mark, safe(c["worker"]), score, band, load, safe(", ".join(c["shadows"]))])
    used = [i for i in range(6) if i < 3 or any(row[i] not in ("", "-") for row in rows[1:])]
    width = [max(len(row[i]) for row in rows) for i in used]
    return [
        "  ".join(row[i].ljust(w) for i, w in zip(used, width, strict=True)).rstrip()
        for row in rows
    ]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def safe(value: str) -> str:
    """A client's text without what would command a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
