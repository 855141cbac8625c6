"""Runs git for the maintainers' commands, the same on every machine: no user or system settings."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from eldr.engine.patching.errors import CannotTell, PatchError
from eldr.engine.patching.mail import Patch
from eldr.engine.patching.place import Tree

# The same commit gives the same bytes, whoever exports it.
_EXPORT = (
    *("--zero-commit", "--full-index", "--no-stat", "--no-signature", "--keep-subject"),
    *("--no-renames", "--no-ext-diff", "--unified=3", "--diff-algorithm=myers"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--no-encode-email-headers"),
)


def run(where: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    """One git command in `where`.

    Raises:
        CannotTell: git is not installed.
        PatchError: it failed (when `check`); with git's own words.
    """
    program = shutil.which("git")
    if program is None:
        raise CannotTell("git is not installed; apply, verify and revert work without it")
    environment = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    # A folder inside another work tree must not be taken for that tree.
    environment |= {"GIT_CEILING_DIRECTORIES": str(where.resolve().parent)}
    environment |= {"GIT_COMMITTER_NAME": "eldr patch", "GIT_COMMITTER_EMAIL": "eldr@localhost"}
    command = [program, "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *words]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, check=False)
    if check and done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise PatchError(f"git {' '.join(words[:2])} in {where}: {said}")
    return done


def write_tree(root: Path, tree: Tree) -> None:
    """Writes the files that exist, removes those that do not."""
    for path, raw in tree.items():
        file = root / path
        if raw is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(raw)


def commit_tree(root: Path, tree: Tree, message: str) -> None:
    """Commits `tree`'s files on the current branch, also when nothing changed."""
    write_tree(root, tree)
    run(root, "add", "--all", "--force")
    author = "--author=upstream <upstream@localhost>"
    run(root, "commit", "--quiet", "--allow-empty", "--no-verify", author, "-m", message)


def create(root: Path, tree: Tree, tag: str) -> None:
    """A new repository that holds `tree` under `tag`."""
    root.mkdir(parents=True, exist_ok=True)
    run(root, "init", "--quiet", "--initial-branch=upstream")
    commit_tree(root, tree, f"Upstream {tag}")
    run(root, "tag", tag)


def am(root: Path, patch: Patch) -> subprocess.CompletedProcess[bytes]:
    """`git am --3way` of one mail; the caller judges the result."""
    mail = root / ".git" / "eldr.mail"
    mail.write_bytes(patch.raw)
    return run(root, "am", "--3way", "--keep-non-patch", str(mail), check=False)


def format_patches(repo: Path, base: str, tip: str, out: Path) -> list[Path]:
    """One mail per commit of base..tip, oldest first."""
    run(repo, "format-patch", "--quiet", *_EXPORT, "-o", str(out), f"{base}..{tip}")
    return sorted(out.glob("*.patch"))


def read_files(repo: Path, revision: str, paths: Iterable[str]) -> dict[str, bytes | None]:
    """Contents at a revision; None for a file that does not exist there."""
    return {path: _show(repo, revision, path) for path in paths}


def _show(repo: Path, revision: str, path: str) -> bytes | None:
    found = run(repo, "ls-tree", "--name-only", revision, "--", path).stdout.strip()
    return run(repo, "cat-file", "blob", f"{revision}:{path}").stdout if found else None


def resolve(repo: Path, *names: str) -> str:
    """The first of some revisions that exists.

    Raises:
        CannotTell: `repo` is no repository, or has none of them.
    """
    if run(repo, "rev-parse", "--git-dir", check=False).returncode:
        raise CannotTell(f"{repo} is not a git repository")
    for name in names:
        if not run(
            repo, "rev-parse", "--verify", "-q", f"{name}^{{commit}}", check=False
        ).returncode:
            return name
    raise CannotTell(f"{repo} has no revision {' or '.join(names)}")
