"""What another upstream release does to the series: where each hunk goes, how each patch merges."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from eldr.engine.patching import git, mail
from eldr.engine.patching.errors import UsageError
from eldr.engine.patching.export import Files, exported
from eldr.engine.patching.mail import Patch
from eldr.engine.patching.onto import Release
from eldr.engine.patching.place import Placement, Tree, place
from eldr.engine.patching.series import Series

APPLIES, MERGES, UPSTREAM, CONFLICT, UNTRIED = (
    "applies",
    "merges",
    "already-upstream",
    "conflict",
    "not-tried",
)

_ONTO = "onto"  # the new release's files, whatever the release is called


@dataclass(frozen=True, slots=True)
class Merge:
    """How one patch came over.

    Attributes:
        patch: its file name.
        result: `applies` (as it stands, lines may have moved), `merges` (three-way),
            `already-upstream` (empty: drop it), `conflict`, or `not-tried` after a conflict.
        files: the conflicting files.
        conflict: git's combined diff of them, both sides marked.
    """

    patch: str
    result: str
    files: tuple[str, ...] = ()
    conflict: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole series on another release."""

    release: Release
    placements: tuple[Placement, ...]
    merges: tuple[Merge, ...]
    history: dict[str, tuple[str, ...]]

    @property
    def clean(self) -> bool:
        """Whether every patch came over."""
        return all(merge.result not in (CONFLICT, UNTRIED) for merge in self.merges)


def rebase(
    series: Series, originals: Tree, release: Release, work: Path, repo: Path | None = None
) -> Report:
    """Carries the series over in a new repository at `work`, stopping at the first conflict.

    The repository is left as it is, so that a conflict can be resolved there with `git am`.

    Args:
        series: the series as made for its own release.
        originals: that release's files.
        release: the other release's files.
        work: an empty or absent folder.
        repo: a clone of upstream, for the history of files that conflict.
    """
    if work.exists() and any(work.iterdir()):
        raise UsageError(f"{work}: not an empty folder")
    tag = f"v{release.version or 'next'}"
    git.create(work, originals, series.upstream.tag)
    git.commit_tree(work, release.files, f"Upstream {tag}")
    git.run(work, "tag", _ONTO)
    git.run(work, "checkout", "--quiet", "-b", f"eldr/{series.upstream.name}-{tag[1:]}")
    merges = list[Merge]()
    for patch in series.patches:
        stopped = bool(merges) and merges[-1].result in (CONFLICT, UNTRIED)
        moved = _on_base(patch, tag)
        merges.append(Merge(patch.name, UNTRIED) if stopped else _merge(work, moved))
    placements = place(series.patches, release.files).placements
    history = _history(series, release, placements, repo)
    return Report(release, placements, tuple(merges), history)


def _on_base(patch: Patch, tag: str) -> Patch:
    """The patch with its `Upstream-Base` trailer naming the new release."""
    text = re.sub(r"(?m)^Upstream-Base: .*$", f"Upstream-Base: {tag}", mail.decode(patch.raw))
    return mail.parse(patch.name, mail.encode(text))


def _merge(work: Path, patch: Patch) -> Merge:
    done = git.am(work, patch)
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == 0:
        if "No changes -- Patch already applied" in said:
            return Merge(patch.name, UPSTREAM)
        return Merge(patch.name, MERGES if "Falling back to patching base" in said else APPLIES)
    unmerged = git.run(work, "diff", "--name-only", "--diff-filter=U").stdout.decode().split()
    diff = git.run(work, "diff").stdout.decode(errors="replace")
    return Merge(patch.name, CONFLICT, tuple(unmerged), diff or said.strip())


def _history(
    series: Series, release: Release, placements: tuple[Placement, ...], repo: Path | None
) -> dict[str, tuple[str, ...]]:
    """Upstream's commits to each conflicting file, newest first, when a clone can tell."""
    if repo is None or not release.revision:
        return {}
    span = f"{git.resolve(repo, series.upstream.tag)}..{release.revision}"
    paths = sorted({p.path for p in placements if p.problem})
    return {
        path: tuple(
            git.run(repo, "log", "--oneline", "--no-merges", "-20", span, "--", path)
            .stdout.decode(errors="replace")
            .splitlines()
        )
        for path in paths
    }


def rebased(series: Series, report: Report, work: Path) -> Files:
    """The series directory for the new release, from a repository that `rebase` left clean.

    Raises:
        UsageError: the release's version is not known.
    """
    version = report.release.version
    if not version:
        raise UsageError(f"{report.release.name}: does not tell its version, give --version")
    moved = replace(series, upstream=series.upstream.moved(version))
    return exported(moved, work, _ONTO, "HEAD")
