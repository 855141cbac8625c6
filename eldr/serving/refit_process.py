"""Runs a refit in a process of its own, which can neither stall nor harm the router."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from eldr.routing import refit_job

COMMAND = (sys.executable, "-P", "-m", "eldr.routing.refit_job")


async def in_a_process(job: refit_job.Job, command: Sequence[str]) -> refit_job.Proposal:
    """Runs a job in a process that ends with this call, however it ends.

    Raises:
        RuntimeError: the process failed; the message is its last line.
        ValueError, KeyError, OSError: its answer is not a proposal.
    """
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
        await asyncio.to_thread(_write, job, asked)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asked, stdout=told, stderr=asyncio.subprocess.PIPE, env=_environment()
        )
        try:
            errors = (await process.communicate())[1].decode(errors="replace").strip()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            last = errors.splitlines()[-1] if errors else "no message"
            raise RuntimeError(f"the fitting process ended with {process.returncode}: {last}")
        return await asyncio.to_thread(_read, told)


def _write(job: refit_job.Job, file: IO[bytes]) -> None:
    job.write(file)
    file.seek(0)


def _read(file: IO[bytes]) -> refit_job.Proposal:
    file.seek(0)
    return refit_job.read_proposal(file)


def _environment() -> dict[str, str]:
    """Ours without the router's secrets: one thread, and modules from where we have them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ELDR_SERVE_")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    return {**kept, **threads, "PYTHONPATH": path}
