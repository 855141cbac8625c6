"""Builds an expert-bound checkpoint: wider expert FFNs that compute the same function.

An expert is down(silu(gate(x)) * up(x)). A unit whose gate row, up row and down column are zero
adds exactly 0, so padding all experts with them leaves every logit as it was, while a decode step
has to read `width / old_width` times the expert bytes. On a small model this makes the step time
follow the distinct experts, as it does on a large model on a GPU.

    python -m eldr.workload.widen eldr/workload/tiny_moe /tmp/wide --width 2048
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eldr.workload.tiny import MODEL_DIR

_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")
_WIDTH_KEY = "moe_intermediate_size"


@dataclass(frozen=True, slots=True)
class Widened:
    """What was written.

    Attributes:
        path: the new checkpoint's folder.
        old_width, width: units of one expert before and after.
        expert_bytes: bytes of one expert's weights now.
        total_bytes: bytes of all weights now.
    """

    path: Path
    old_width: int
    width: int
    expert_bytes: int
    total_bytes: int


def widen_experts(source: Path, target: Path, width: int) -> Widened:
    """Copies the checkpoint `source` to `target` with every routed expert `width` units wide.

    Works on Hugging Face checkpoints that store experts one by one (`...experts.N.gate_proj.weight`
    [units, hidden], `up_proj` alike, `down_proj` [hidden, units]), in one or several files.
    `target` appears only when it is complete.

    Raises:
        FileNotFoundError: `source` is not a checkpoint folder.
        FileExistsError: `target` exists.
        ValueError: no such experts, or `width` is below their present width.
    """
    config = _read_config(source)
    old = config.get(_WIDTH_KEY)
    if not isinstance(old, int):
        raise ValueError(f"{source / 'config.json'}: no {_WIDTH_KEY}; is this an MoE model?")
    if width < old:
        raise ValueError(
            f"width {width} is below the experts' width {old}: units cannot be removed"
        )
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        work = Path(scratch) / "checkpoint"
        work.mkdir()
        total, expert = _copy(source, work, old, width)
        config[_WIDTH_KEY] = width
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        work.rename(target)
    return Widened(target, old, width, expert, total)


def _read_config(source: Path) -> dict[str, object]:
    path = source / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; the source must be a Hugging Face checkpoint")
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return config


def _copy(source: Path, work: Path, old: int, width: int) -> tuple[int, int]:
    """Copies every file, weights widened; returns bytes of all weights and of one expert."""
    total, by_projection = 0, dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 0)
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file() and path.name != "config.json":
                shutil.copyfile(path, work / path.name)
            continue
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(str(path), "pt") as weights:
            metadata = weights.metadata()
            for name in weights.keys():  # noqa: SIM118 - not a mapping, only `keys` lists names
                tensor = weights.get_tensor(name)
                if match := _EXPERT.search(name):
                    tensor = _pad(name, tensor, match[1], old, width)
                    by_projection[match[1]] = tensor.nbytes
                tensors[name] = tensor
                total += tensor.nbytes
        save_file(tensors, str(work / path.name), metadata=metadata)
        shutil.copymode(path, work / path.name)  # save_file makes it private
    if not all(by_projection.values()):
        raise ValueError(f"{source}: no weights named ...experts.N.(gate|up|down)_proj.weight")
    return total, sum(by_projection.values())


def _pad(name: str, tensor: torch.Tensor, projection: str, old: int, width: int) -> torch.Tensor:
    axis = 1 if projection == "down_proj" else 0
    if tensor.ndim != 2 or tensor.shape[axis] != old:
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)}, expected {old} units on axis {axis}; "
            "quantised experts cannot be widened"
        )
    shape = list(tensor.shape)
    shape[axis] = width
    out = tensor.new_zeros(shape)
    out.narrow(axis, 0, old).copy_(tensor)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module; prints what was written as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.widen",
        description="Widen a checkpoint's experts with zero-weight units (same function).",
    )
    parser.add_argument("source", type=Path, nargs="?", default=MODEL_DIR, help="checkpoint folder")
    parser.add_argument("target", type=Path, help="folder to create")
    parser.add_argument("--width", type=int, required=True, help="units of one expert afterwards")
    args = parser.parse_args(argv)
    try:
        report = widen_experts(args.source, args.target, args.width)
    except (OSError, ValueError) as error:
        print(f"widen: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report) | {"path": str(report.path)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
