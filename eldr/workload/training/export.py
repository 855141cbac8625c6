"""Turns a training checkpoint (float32) into the bfloat16 folder that serving engines load.

python -m eldr.workload.training.export CHECKPOINT_DIR MODEL_DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eldr.workload.training.tokenizer import END_ID, PAD_ID

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def export(checkpoint: Path, target: Path, temperature: float = 0.8) -> int:
    """Writes weights, configuration, sampling defaults and tokenizer; returns the weights' bytes.

    Raises:
        FileNotFoundError: `checkpoint` lacks a file.
        FileExistsError: `target` exists.
    """
    weights = load_file(str(checkpoint / "model.safetensors"))
    config = json.loads((checkpoint / "config.json").read_text())
    # Engines differ in which of the two spellings they read.
    config["num_experts"] = config.get("num_experts", config.get("num_local_experts"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True}
    config.pop("_experts_implementation", None)
    sampling = {
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": temperature,
    }
    target.mkdir(parents=True)
    narrow = {name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()}
    save_file(narrow, str(target / "model.safetensors"), metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # save_file makes it private
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (target / "generation_config.json").write_text(json.dumps(sampling, indent=1) + "\n")
    for name in _TOKENIZER:
        shutil.copyfile(checkpoint / name, target / name)
    return sum(w.nbytes for w in narrow.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.export",
        description="Export a training checkpoint as a bfloat16 model folder.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder that training.train wrote")
    parser.add_argument("model", type=Path, help="folder to create")
    parser.add_argument("--temperature", type=float, default=0.8, help="default when sampling")
    args = parser.parse_args(argv)
    try:
        size = export(args.checkpoint, args.model, args.temperature)
    except (OSError, KeyError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"{args.model}: {size / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
