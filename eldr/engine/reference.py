"""Reference signatures from vLLM itself: its own routed-experts output, counted in NumPy.

    python -m eldr.engine.reference MODEL PROMPTS.jsonl OUT.npz

runs MODEL in this process with `enable_return_routed_experts` and ELDR off (model runner V2;
on a CPU through Triton's interpreter), so that nothing of ELDR's takes part. Each line of
PROMPTS.jsonl is an object with `prompt` (text) or `token_ids`; OUT.npz has the form of recorded
signatures, one row per line, in order. Works with the patched and the unpatched vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.engine.testing import inprocess
from eldr.geometry import Geometry

Prompt = str | list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON-lines file; a line without `prompt` or `token_ids` is an error."""
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        found = entry.get("token_ids", entry.get("prompt")) if isinstance(entry, dict) else None
        if not isinstance(found, str | list) or not found:
            raise ValueError(f"{path}:{number}: expected an object with `prompt` or `token_ids`")
        prompts.append(found)
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def count(
    routed: npt.NDArray[Any], moe_layers: Sequence[int], experts: int
) -> npt.NDArray[np.uint32]:
    """Hits of routed ids [tokens, all layers, K], MoE layers only: uint32 [L, E]."""
    layers = (routed[:, layer].ravel() for layer in moe_layers)
    return np.stack([np.bincount(ids, minlength=experts) for ids in layers]).astype(np.uint32)


def run(
    llm: Any, prompts: Sequence[Prompt]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32], Geometry]:
    """Counts uint32 [N, L, E], prompt tokens int32 [N], and the geometry of the model."""
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    config = llm.llm_engine.vllm_config.model_config
    modules = inprocess.worker(llm).model_runner.model.modules()
    layers = sorted({m.layer_id for m in modules if isinstance(m, MoERunner)})
    experts = int(config.get_num_experts())
    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(inputs, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    counts, tokens = [], []
    for output in outputs:
        size = len(output.prompt_token_ids)
        routed = np.asarray(output.outputs[0].routed_experts)
        if routed.shape[0] != size:
            raise RuntimeError(f"vLLM returned {routed.shape[0]} of {size} tokens' experts")
        counts.append(count(routed, layers, experts))
        tokens.append(size)
    geometry = Geometry(len(layers), experts, int(config.get_num_experts_per_tok()))
    return np.stack(counts), np.array(tokens, np.int32), geometry


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the reference of a prompt file."""
    parser = argparse.ArgumentParser("eldr.engine.reference", description=__doc__)
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("prompts", type=Path, help="JSON lines with `prompt` or `token_ids`")
    parser.add_argument("out", type=Path, help="where to write the counts (.npz)")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: the model's")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompts(args.prompts)
    except (OSError, ValueError) as error:
        print(f"eldr.engine.reference: {error}", file=sys.stderr)
        return 2
    llm = inprocess.start(
        args.model,
        "v2",
        enable_return_routed_experts=True,
        max_model_len=args.max_model_len,
    )
    counts, tokens, geometry = run(llm, prompts)
    with args.out.open("wb") as file:
        np.savez_compressed(
            file,
            counts=counts,
            tokens=tokens,
            coverage=np.ones(len(tokens), np.float32),
            geometry=np.array([geometry.layers, geometry.experts, geometry.top_k], np.int32),
            model=np.array(args.model),
        )
    print(f"{len(tokens)} prompts, {geometry}: {args.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
