"""The source branch and the committed files: the same series in two forms, kept equal.

The branch (`eldr/vllm-0.32.0`, made from upstream's tag) is where patches are edited and rebased;
the files are what is shipped. `branch` makes the first from the second, `export` the reverse.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from eldr.engine.patching import git, mail, manifest
from eldr.engine.patching.errors import PatchError, UsageError
from eldr.engine.patching.pin import pinned, pristine
from eldr.engine.patching.series import ORDER, Series
from eldr.engine.patching.target import Target

Files = dict[str, bytes]


def branch_name(series: Series) -> str:
    """The source branch of a series."""
    return f"eldr/{series.upstream.name}-{series.upstream.version}"


def branch(series: Series, target: Target, where: Path) -> str:
    """Makes a repository with the package's Python files at the tag and the series on its branch.

    Raises:
        UsageError: `where` is not empty.
        PatchError: the target is not pristine or the series does not apply.
    """
    if where.exists() and any(where.iterdir()):
        raise UsageError(f"--to {where}: not an empty folder")
    package = target.root / series.upstream.name
    tree: dict[str, bytes | None] = {
        path.relative_to(target.root).as_posix(): path.read_bytes()
        for path in package.rglob("*.py")
    }
    git.create(where, tree | pristine(series, target), series.upstream.tag)
    git.run(where, "checkout", "--quiet", "-b", branch_name(series))
    _replay(where, series)
    return branch_name(series)


def rebuilt(series: Series, target: Target) -> Files:
    """The series as an export of its own replay on the target's originals would write it."""
    with tempfile.TemporaryDirectory(prefix="eldr-patch-") as folder:
        repo = Path(folder) / "repo"
        git.create(repo, pristine(series, target), series.upstream.tag)
        git.run(repo, "checkout", "--quiet", "-b", branch_name(series))
        _replay(repo, series)
        return exported(series, repo, series.upstream.tag, branch_name(series))


def _replay(repo: Path, series: Series) -> None:
    for patch in series.patches:
        done = git.am(repo, patch)
        if done.returncode:
            said = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise PatchError(f"git am {patch.name}: {said}")


def exported(series: Series, repo: Path, base: str, tip: str) -> Files:
    """Every file of the series directory, as the commits base..tip make it.

    A patch keeps the file name under which its subject is in the series; a new one is named after
    its subject.
    """
    known = {patch.subject: patch.name for patch in series.patches}
    patches = list[mail.Patch]()
    with tempfile.TemporaryDirectory(prefix="eldr-patch-") as folder:
        for path in git.format_patches(repo, base, tip, Path(folder)):
            parsed = mail.parse(path.name, path.read_bytes())
            name = known.get(parsed.subject) or f"{_slug(parsed.subject)}.patch"
            patches.append(mail.parse(name, parsed.raw))
    made = Series(series.directory, series.upstream, tuple(patches))
    upstream = pinned(made, git.read_files(repo, base, made.paths))
    files = {patch.name: patch.raw for patch in patches}
    if len(files) != len(patches):
        raise PatchError("two commits have the same subject; give each its own")
    files[ORDER] = _order(series, [patch.name for patch in patches])
    files[manifest.FILE] = manifest.render(upstream).encode()
    return files


def _slug(subject: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:60].rstrip("-")


def _order(series: Series, names: list[str]) -> bytes:
    """The `series` file, with its comments when the order has not changed."""
    if [patch.name for patch in series.patches] == names:
        return (series.directory / ORDER).read_bytes()
    return "".join(f"{name}\n" for name in names).encode()


def differences(directory: Path, files: Files) -> list[str]:
    """How a directory differs from an export, one line each; empty if it is byte-identical."""
    lines = []
    for name, raw in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            lines.append(f"{name}: not there")
        elif path.read_bytes() != raw:
            lines.append(f"{name}: differs from the branch")
    extra = {path.name for path in directory.glob("*.patch")} - files.keys()
    return lines + [f"{name}: not on the branch" for name in sorted(extra)]


def write(directory: Path, files: Files) -> None:
    """Makes a directory hold exactly the exported patches; other files in it stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.patch"):
        if path.name not in files:
            path.unlink()
    for name, raw in files.items():
        (directory / name).write_bytes(raw)
