"""vLLM's API server with model runner V2 on a CPU, the one that returns its routing.

The process that runs the engine is spawned and imports this module again, so the interpreter is
installed there too. Arguments are the server's.
"""

from __future__ import annotations

import runpy

from eldr.engine.testing import inprocess

inprocess.prepare("v2")

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
