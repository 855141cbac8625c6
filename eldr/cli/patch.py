"""`eldr patch`: the vLLM patch series, on an installed wheel or a checkout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eldr.cli import DONE, NO, patch_maintain
from eldr.cli.patch_text import Answer, hunk_data, hunk_text
from eldr.engine.patching import change, series, target
from eldr.engine.patching.errors import PatchError
from eldr.engine.patching.series import Series
from eldr.engine.patching.state import PARTIAL, PATCHED, PRISTINE, SOUND, Survey, survey

_EPILOG = """\
The target is the vLLM that this Python would import, or --target: a site-packages folder, a
virtual environment, a checkout, an unpacked source archive.

apply on a tree that holds the series already changes nothing and exits 1, unless --if-needed.

examples:
  eldr patch apply                                 patch the vLLM of this environment
  eldr patch verify --json
  eldr patch check --target /opt/vllm-checkout
  eldr patch revert --if-needed
  eldr patch rebase --onto 0.33.0

exit codes: 0 done, 1 no (conflict, drift, not patched), 2 usage, 3 cannot tell (no vLLM there)
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, help: str, targeted: bool = True) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        sub.add_argument("--patches", type=Path, metavar="DIR", help="another series directory")
        if targeted:
            sub.add_argument("--target", type=Path, metavar="DIR", help="the tree to patch")
        return sub

    add("check", "say where every hunk would go; change nothing")
    apply = add("apply", "patch the tree: all of it or nothing, verified by hash")
    apply.add_argument("--if-needed", action="store_true", help="exit 0 when it is patched already")
    apply.add_argument(
        "--force-version",
        action="store_true",
        help="accept another vLLM release if its files are unmodified and every hunk fits",
    )
    add("verify", "say whether the tree holds exactly this series, file by file")
    revert = add("revert", "restore the original files")
    revert.add_argument("--if-needed", action="store_true", help="exit 0 when it is not patched")
    add("list", "show the series", False)
    patch_maintain.configure(add)


def run(args: argparse.Namespace) -> int:
    """Runs one action; a refusal goes to stderr, and to stdout as JSON when asked."""
    try:
        code, data, text = _ACTIONS[args.action](args)
    except PatchError as error:
        print(f"eldr patch {args.action}: {error}", file=sys.stderr)
        code, data, text = error.exit_code, {"error": str(error)}, ""
    if args.json:
        print(json.dumps({"action": args.action, "exit": code, **data}))
    elif text:
        print(text)
    return code


def _load(args: argparse.Namespace) -> Series:
    return series.load(args.patches)


def _check(args: argparse.Namespace) -> Answer:
    loaded = _load(args)
    found, placements = change.check(loaded, target.locate(loaded.upstream, args.target))
    fits = found.state in SOUND or found.state == PARTIAL
    fits = fits and found.version_fits and not any(p.problem for p in placements)
    data = _tree(found) | {"fits": fits, "hunks": [hunk_data(p) for p in placements]}
    lines = [hunk_text(p) for p in placements]
    lines += [f"{file.path}: {file.state}" for file in found.obstacles()]
    if not found.version_fits:
        lines.append(f"the series is for {loaded.upstream.name} {loaded.upstream.version}")
    verdict = "already applied" if found.state == PATCHED else "fits" if fits else "does not fit"
    return (DONE if fits else NO), data, "\n".join([*lines, f"{found.target}: {verdict}"])


def _apply(args: argparse.Namespace) -> Answer:
    loaded = _load(args)
    where = target.locate(loaded.upstream, args.target)
    outcome = change.apply(loaded, where, force_version=args.force_version)
    data = {
        "target": str(where.root),
        "version": where.version,
        "series": loaded.digest,
        "before": outcome.before,
        "changed": list(outcome.changed),
    }
    if not outcome.changed:
        return _nothing(args, data, f"{where}: already applied (series {loaded.digest})")
    how = "applied" if outcome.before == PRISTINE else f"applied (the tree was {outcome.before})"
    files = len(outcome.changed)
    text = f"{where}: {how}, series {loaded.digest}, {files} file{'s' * (files != 1)} changed"
    return DONE, data, text


def _revert(args: argparse.Namespace) -> Answer:
    loaded = _load(args)
    where = target.locate(loaded.upstream, args.target)
    outcome = change.revert(loaded, where)
    data = {
        "target": str(where.root),
        "before": outcome.before,
        "changed": list(outcome.changed),
    }
    if not outcome.changed:
        return _nothing(args, data, f"{where}: not patched, nothing to revert")
    return DONE, data, f"{where}: reverted, {len(outcome.changed)} files restored or removed"


def _nothing(args: argparse.Namespace, data: dict[str, Any], text: str) -> Answer:
    """The answer to a change that has nothing to do: no, unless the caller only wants the state."""
    if args.if_needed:
        return DONE, data, text
    print(f"eldr patch {args.action}: {text}; nothing was changed", file=sys.stderr)
    return NO, data, ""


def _verify(args: argparse.Namespace) -> Answer:
    loaded = _load(args)
    found = survey(loaded, target.locate(loaded.upstream, args.target))
    patched = found.state == PATCHED
    lines = [f"{file.path}: {file.state}" for file in found.files]
    lines.append(f"{found.target}: {found.state}")
    if not patched:
        lines.append(_repair(found))
    return (DONE if patched else NO), _tree(found), "\n".join(lines)


def _repair(found: Survey) -> str:
    if found.obstacles():
        return change.explain(found)
    return "run `eldr patch apply`"


def _list(args: argparse.Namespace) -> Answer:
    loaded = _load(args)
    rows = [
        {
            "name": patch.name,
            "subject": patch.subject,
            "files": [file.path for file in patch.files],
            "added": patch.added,
            "removed": patch.removed,
            "trailers": patch.trailers,
        }
        for patch in loaded.patches
    ]
    upstream = loaded.upstream
    data = {"upstream": upstream.name, "version": upstream.version, "tag": upstream.tag}
    lines = [f"{upstream.name} {upstream.version} ({upstream.tag}), series {loaded.digest}"]
    for number, patch in enumerate(loaded.patches, 1):
        size = f"+{patch.added}/-{patch.removed} in {len(patch.files)} files"
        forwarded = patch.trailers.get("Forwarded", "?")
        lines.append(f"{number}  {patch.subject}")
        lines.append(f"   {patch.name}  {size}, forwarded: {forwarded}")
    return DONE, data | {"series": loaded.digest, "patches": rows}, "\n".join(lines)


def _tree(found: Survey) -> dict[str, Any]:
    record = found.record
    return {
        "target": str(found.target.root),
        "distribution": found.target.distribution,
        "version": found.target.version,
        "state": found.state,
        "series": found.series.digest,
        "recorded_series": record.series if record else None,
        "files": {file.path: file.state for file in found.files},
    }


_ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "check": _check,
    "apply": _apply,
    "verify": _verify,
    "revert": _revert,
    "list": _list,
    **patch_maintain.ACTIONS,
}
