"""Runs a page's commands, one after another, as its reader would: on workers that replay a trace.

Addresses of the page become those of the stand-ins, port 30000 a free one. A server stays up until
the page starts the next one or ends. What needs a GPU, or would install things, is checked without
being done: `vllm serve` by vLLM's own parser and ELDR's reading of the result, `pip install`
against this project's metadata, `make` by `make -n`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from eldr.demo.ports import free_ports
from eldr.engine.patching import series, target
from eldr.engine.patching.pin import pristine
from tests.documents import ROOT, Command
from tests.serving.mocks.worker import workers
from tests.serving.page.traced import TracedDecode, TracedPrefill, trace

# Exit codes with which a command has done what the page says it does.
ANSWERS = {"doctor": {0, 1, 3}, "assess": {0, 1, 3}, "examples/ab_on_live_traffic.py": {0, 1}}
_VLLM = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from eldr.engine.config import read
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for words in json.load(sys.stdin):
    args = parser.parse_args(words[1:])
    connector = args.kv_transfer_config
    name = connector["kv_connector"] if isinstance(connector, dict) else connector.kv_connector
    print(json.dumps({"connector": name, "role": read(args.additional_config).role}))
"""


@dataclass
class Walk:
    """One reading of a page.

    Attributes:
        folder: where the reader stands.
        addresses: the page's addresses, and what they are here.
        outputs: what each command that has run printed on stdout.
        dry: commands that were checked without being done.
        traffic: called with the router's URL once a server is up.
    """

    folder: Path
    addresses: dict[str, str]
    traffic: Callable[[str], None]
    outputs: list[tuple[Command, int, str]] = field(default_factory=list)
    dry: list[Command] = field(default_factory=list)
    _server: asyncio.subprocess.Process | None = None

    async def do(self, command: Command) -> None:
        """Runs or checks one command; whatever is neither fails."""
        program, *rest = command.words
        if program == "eldr" and rest[0] == "serve":
            await self._serve(command)
        elif program == "eldr" and rest[0] == "patch":
            await asyncio.to_thread(self._patch, command)
        elif program in ("eldr", "curl") or rest[0].startswith("examples/"):
            await asyncio.to_thread(self._run, command)
        elif program == "make":
            self._dry(command, ["make", "-n", *rest], ROOT)
        elif program == "pip":
            check_requirements(command)
            self.dry.append(command)
        elif program == "vllm":
            self.dry.append(command)
        else:
            raise AssertionError(f"{command}: neither run nor checked")

    def words(self, command: Command) -> list[str]:
        """The command's words, here."""
        address = re.compile(r"http://[\w.]+:\d+")
        here = [address.sub(lambda m: self.addresses[m[0]], word) for word in command.words]
        free = self.addresses["http://127.0.0.1:30000"].rpartition(":")[2]
        return [free if word == "30000" else word for word in here]

    async def _serve(self, command: Command) -> None:
        await self.stop()
        self.addresses["http://127.0.0.1:30000"] = f"http://127.0.0.1:{free_ports(1)[0]}"
        words = [sys.executable, "-m", *self.words(command)]
        self._server = await asyncio.create_subprocess_exec(
            *words, cwd=self.folder, env=_environment(), stderr=asyncio.subprocess.PIPE
        )
        assert self._server.stderr is not None
        said = b""
        async with asyncio.timeout(60):
            while b"router ready" not in said:
                line = await self._server.stderr.readline()
                assert line, f"{command}\n{said.decode()}"
                said += line
        await asyncio.to_thread(self.traffic, self.addresses["http://127.0.0.1:30000"])

    async def stop(self) -> None:
        """Stops the server, which must end well."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(self._server.communicate(), 180)
        assert self._server.returncode == 0, err.decode()
        self._server = None

    def _run(self, command: Command) -> None:
        words = self.words(command)
        if words[0] == "eldr":
            words = [sys.executable, "-m", *words]
        elif words[0] == "python":
            words = [sys.executable, str(ROOT / words[1]), *words[2:]]
        done = subprocess.run(
            words, cwd=self.folder, env=_environment(), capture_output=True, text=True, timeout=300
        )
        wanted = ANSWERS.get(command.words[1], {0})
        assert done.returncode in wanted, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        self.outputs.append((command, done.returncode, done.stdout))

    def _patch(self, command: Command) -> None:
        """For real, on a copy of the files that the series touches."""
        copy = self.folder / "site-packages"
        if not copy.exists():
            copy_of_vllm(copy)
        done = subprocess.run(
            [sys.executable, "-m", *command.words, "--target", str(copy)],
            cwd=self.folder, env=_environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self.outputs.append((command, 0, done.stdout))

    def _dry(self, command: Command, words: list[str], folder: Path) -> None:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        self.dry.append(command)


def _environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ELDR_SERVE_")}
    return clean | {"PYTHONPATH": str(ROOT)}


def copy_of_vllm(folder: Path) -> None:
    """The installed vLLM's files that the series touches, as their release has them."""
    shipped = series.load()
    installed = target.locate(shipped.upstream)
    kept = {"vllm/__init__.py": installed.read("vllm/__init__.py"), **pristine(shipped, installed)}
    for path, raw in kept.items():
        if raw is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(raw)


def check_requirements(command: Command) -> None:
    """What `pip install` is told exists: extras of this project, and the vLLM of the series."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    upstream = tomllib.loads((ROOT / "patches/UPSTREAM.toml").read_text())
    for word in command.words[2:]:
        if word.startswith("-"):
            continue
        if word.startswith("."):
            named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
            assert named, f"{command}: {word}"
            missing = set(filter(None, (named[1] or "").split(","))) - set(
                project["optional-dependencies"]
            )
            assert not missing, f"{command}: no extra {missing}"
        else:
            requirement = Requirement(word)
            if requirement.name == "vllm":
                assert str(requirement.specifier) == f"=={upstream['version']}", command


def parse_vllm(found: list[Command]) -> list[dict[str, str]]:
    """Connector and ELDR's role of each `vllm serve`, parsed by vLLM and read by ELDR."""
    done = subprocess.run(
        [sys.executable, "-c", _VLLM],
        input=json.dumps([list(command.words) for command in found]),
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@asynccontextmanager
async def walk(folder: Path, traffic: Callable[[str], None]) -> AsyncIterator[Walk]:
    """A reader with the files of a page's beginning, and stand-ins for its workers."""
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(0, len(trace()), 3):
            domain = str(trace().domains[trace().domain[i]])
            file.write(json.dumps({"prompt": f"trace:{i}", "domain": domain}) + "\n")
    (folder / "request.json").write_text(
        json.dumps({"model": "m", "prompt": "trace:5", "max_tokens": 8, "stream": True})
    )
    prefill, decode = TracedPrefill(), [TracedDecode(0.002) for _ in range(2)]
    async with workers(prefill, *decode):
        addresses = {"http://p0:8100": prefill.url, "http://127.0.0.1:30000": "http://127.0.0.1:1"}
        addresses |= {f"http://d{i}:8200": worker.url for i, worker in enumerate(decode)}
        walking = Walk(folder, addresses, traffic)
        try:
            yield walking
        finally:
            await walking.stop()
