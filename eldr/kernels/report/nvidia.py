"""Reads NVIDIA machine code with the tools that Triton ships: cuobjdump and nvdisasm."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_USAGE = re.compile(
    r"Function (?P<name>\S+?):\s+REG:(?P<reg>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) "
    r"LOCAL:(?P<local>\d+)"
)
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),", re.MULTILINE)
# An instruction's opcode, or a label (the group is then empty).
_LINE = re.compile(
    r"^(?:\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)|\.L_x_\d+:)", re.M
)


@dataclass(frozen=True, slots=True)
class Usage:
    """One function of a cubin."""

    registers: int
    spills: int
    shared: int
    code: list[str]  # opcodes in order, and labels as ""

    @property
    def opcodes(self) -> Counter[str]:
        """How often each occurs."""
        return Counter(op for op in self.code if op)

    def batch(self) -> int:
        """Most 128-bit loads between two branches."""
        most = here = 0
        for opcode in self.code:
            family, *parts = opcode.split(".")
            if family in ("", "BRA", "EXIT", "BAR", "RET"):
                here = 0
            elif family in ("LDG", "LDGSTS") and "128" in parts:
                here += 1
                most = max(most, here)
        return most

    def count(self, *families: str, having: str = "") -> int:
        """Instructions whose first part is one of `families` and that have the part `having`."""
        return sum(
            n
            for opcode, n in self.opcodes.items()
            if opcode.split(".")[0] in families and (not having or having in opcode.split("."))
        )


class UnreadableError(RuntimeError):
    """A tool does not understand a cubin: it is older than the compiler that made it."""


def tool(name: str) -> Path:
    """A binary that Triton ships.

    Raises:
        FileNotFoundError: Triton is missing, or ships no such tool.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{name}: it comes with Triton, which is not installed")
    path = Path(spec.origin).parent / "backends/nvidia/bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{name}: not in {path.parent}")
    return path


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message")[:300]
        raise UnreadableError(
            f"{command[0]}: {said}. It reads what compilers up to its own version make: install an "
            "older nvidia-cuda-nvrtc or a newer Triton"
        )
    return done.stdout


def functions(cubin: Path) -> dict[str, Usage]:
    """Every kernel of a cubin by its symbol.

    Raises:
        UnreadableError: the tools are older than the cubin.
    """
    code = dict(_code(_output(tool("nvdisasm"), "-c", cubin)))
    found = {}
    for match in _USAGE.finditer(_output(tool("cuobjdump"), "--dump-resource-usage", cubin)):
        own = code.get(match["name"], [])
        spills = int(match["stack"]) + int(match["local"])
        local = sum(1 for op in own if op.split(".")[0] in ("LDL", "STL"))
        found[match["name"]] = Usage(
            int(match["reg"]), max(spills, 4 * local), int(match["shared"]), own
        )
    if not found:
        raise UnreadableError(f"{cubin.name}: cuobjdump names no function")
    return found


def _code(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    starts = list(_SECTION.finditer(disassembly))
    for i, start in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(disassembly)
        yield start[1], _LINE.findall(disassembly[start.end() : end])
