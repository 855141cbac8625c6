"""`eldr patch pin|branch|export|rebase`: for those who change the series."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from eldr.cli import DONE, NO
from eldr.cli.patch_text import Answer, hunk_data, hunk_text
from eldr.engine.patching import export, git, lint, onto, pin, rebase, series, target
from eldr.engine.patching.errors import UsageError
from eldr.engine.patching.rebase import Report
from eldr.engine.patching.series import Series


def configure(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the maintainers' actions; `add(name, help)` makes a sub-parser."""
    add("pin", "recompute the hashes in UPSTREAM.toml from an unmodified tree")
    make = add("branch", "make a git repository with the series as commits, to edit it there")
    make.add_argument("--to", type=Path, required=True, metavar="DIR", help="an empty folder")
    out = add("export", "write the series from its source branch, or compare the two")
    out.add_argument("--repo", type=Path, metavar="DIR", help="the clone with the source branch")
    out.add_argument("--branch", metavar="NAME", help="default: eldr/<name>-<version>")
    out.add_argument("--base", metavar="TAG", help="default: the tag in UPSTREAM.toml")
    out.add_argument("--release", metavar="V", help="the base is this release, not UPSTREAM.toml's")
    out.add_argument(
        "--check",
        action="store_true",
        help="compare only: with the branch in --repo, or without one with a replay of the series",
    )
    move = add("rebase", "report what another upstream release does to each hunk")
    move.add_argument(
        "--onto", required=True, metavar="VERSION|DIR", help="a release, or a tree of one"
    )
    move.add_argument("--repo", type=Path, metavar="DIR", help="take VERSION from this clone")
    move.add_argument("--version", metavar="V", help="the version of DIR, if it does not tell")
    move.add_argument("--work", type=Path, metavar="DIR", help="keep the merge here, to resolve it")
    move.add_argument("--write", type=Path, metavar="DIR", help="write the rebased series here")


def _pin(args: argparse.Namespace) -> Answer:
    loaded = series.load(args.patches, pinned=False)
    changed = pin.pin(loaded, target.locate(loaded.upstream, args.target))
    text = f"{loaded.directory}: hashes {'rewritten' if changed else 'were right already'}"
    return DONE, {"changed": changed}, text


def _branch(args: argparse.Namespace) -> Answer:
    loaded = series.load(args.patches)
    name = export.branch(loaded, target.locate(loaded.upstream, args.target), args.to)
    text = (
        f"{args.to}: branch {name}, one commit per patch on {loaded.upstream.tag}. Edit and commit "
        f"there (git rebase -i {loaded.upstream.tag}), then: eldr patch export --repo {args.to}"
    )
    return DONE, {"repo": str(args.to), "branch": name, "base": loaded.upstream.tag}, text


def _export(args: argparse.Namespace) -> Answer:
    loaded = series.load(args.patches, pinned=False)
    if args.release:
        loaded = replace(loaded, upstream=loaded.upstream.moved(args.release))
    files, source = _source(args, loaded)
    if not args.check:
        changed = export.differences(loaded.directory, files)
        export.write(loaded.directory, files)
        text = "\n".join([*changed, f"{loaded.directory}: {len(changed)} files written anew"])
        return DONE, {"source": source, "changed": changed}, text
    problems = export.differences(loaded.directory, files) + lint.lint(loaded)
    verdict = "differs; run `eldr patch export`" if problems else "byte-identical"
    text = "\n".join([*problems, f"{loaded.directory} against {source}: {verdict}"])
    return (NO if problems else DONE), {"source": source, "problems": problems}, text


def _source(args: argparse.Namespace, loaded: Series) -> tuple[export.Files, str]:
    if args.repo is None:
        if not args.check or args.branch or args.base:
            raise UsageError("name the clone that holds the source branch with --repo")
        where = target.locate(loaded.upstream, args.target)
        return export.rebuilt(loaded, where), f"a replay on {where}"
    name = git.resolve(args.repo, args.branch or export.branch_name(loaded))
    base = git.resolve(args.repo, args.base or loaded.upstream.tag)
    return export.exported(loaded, args.repo, base, name), f"{name} in {args.repo}"


def _rebase(args: argparse.Namespace) -> Answer:
    loaded = series.load(args.patches)
    originals = pin.pristine(loaded, target.locate(loaded.upstream, args.target))
    release = onto.fetch(loaded.upstream, args.onto, loaded.paths, args.repo, args.version)
    with tempfile.TemporaryDirectory(prefix="eldr-patch-") as folder:
        work = args.work or Path(folder) / "work"
        report = rebase.rebase(loaded, originals, release, work, args.repo)
        if args.write and report.clean:
            export.write(args.write, rebase.rebased(loaded, report, work))
    return (DONE if report.clean else NO), _report_data(report), _report_text(args, report)


def _report_data(report: Report) -> dict[str, Any]:
    return {
        "onto": report.release.name,
        "version": report.release.version,
        "clean": report.clean,
        "hunks": [hunk_data(p) for p in report.placements],
        "patches": [
            {"patch": m.patch, "result": m.result, "files": list(m.files), "conflict": m.conflict}
            for m in report.merges
        ],
        "history": {path: list(lines) for path, lines in report.history.items()},
    }


def _report_text(args: argparse.Namespace, report: Report) -> str:
    lines = [hunk_text(p) for p in report.placements]
    for merge in report.merges:
        lines.append(f"{merge.patch}: {merge.result}")
        lines += [f"    {line}" for line in merge.conflict.splitlines()]
        if merge.result == rebase.UPSTREAM:
            lines.append("    upstream has this change: drop the patch")
    for path, commits in report.history.items():
        lines += [f"upstream commits to {path}:", *(f"    {line}" for line in commits)]
    if report.clean:
        done = f", written to {args.write}" if args.write else "; --write DIR writes the result"
        return "\n".join([*lines, f"the series comes over to {report.release.name}{done}"])
    how = (
        "resolve it there: edit, git add, git am --continue" if args.work else "--work DIR keeps it"
    )
    return "\n".join([*lines, f"the series stops at a conflict; {how}"])


ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "pin": _pin,
    "branch": _branch,
    "export": _export,
    "rebase": _rebase,
}
