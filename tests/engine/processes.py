"""One engine per process: vLLM keeps global state, so each test runs its engine in its own."""

import json
import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SECONDS = 1500  # of a busy machine


def python(*arguments, check=True, **settings):
    """Runs this Python with these arguments; with `check`, it must exit with 0."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | settings,
        timeout=SECONDS,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr[-4000:]
    return done


def last_line(done):
    """The JSON value that it printed last."""
    return json.loads(done.stdout.strip().splitlines()[-1])
