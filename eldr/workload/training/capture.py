"""Records expert traces of held-out prompts: prefill, then sampled decode, with transformers.

    python -m eldr.workload.training.capture MODEL_DIR CORPUS_DIR TRACE.npz --per-domain 110

The controls replace what training learned, to see how much of an effect is due to it: `untrained`
draws all weights anew, `random-routers` only the routers'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, Qwen3MoeForCausalLM

from eldr.workload.traces import ExpertTrace
from eldr.workload.training.corpus import read_domains
from eldr.workload.training.model import load_model, watch_routers
from eldr.workload.training.tokenizer import END_ID, PAD_ID, Ids, read_ids

CONTROLS = ("trained", "untrained", "random-routers")


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record.

    Attributes:
        prompt: tokens of a prompt.
        decode: sampled tokens after it.
        temperature: of sampling; 0 takes the likeliest token.
        seed: of sampling.
    """

    prompt: int = 192
    decode: int = 96
    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.decode) < 1 or not self.temperature >= 0:
            raise ValueError(f"recording: lengths and temperature must be positive, got {self}")


def held_out_prompts(ids: Ids, length: int, most: int, rng: np.random.Generator) -> Ids:
    """Up to `most` disjoint pieces of a held-out text, in its order: uint16 [N, length].

    Raises:
        ValueError: the text is shorter than one piece.
    """
    pieces = (len(ids) - 1) // length
    if pieces < 1:
        raise ValueError(f"{len(ids)} held-out tokens, need {length + 1}")
    chosen = np.sort(rng.choice(pieces, min(most, pieces), replace=False))
    return ids[: pieces * length].reshape(pieces, length)[chosen]


@torch.no_grad()
def record(
    model: Qwen3MoeForCausalLM, prompts: Ids, how: Recording, seed: int
) -> tuple[npt.NDArray[Any], Ids]:
    """Runs one batch; returns picks uint8 [N, prompt + decode, L, K] and token ids, alike [N, ...].

    The last sampled token is fed as well, so every token of the result has its picks.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.from_numpy(prompts.astype(np.int64))
    cache = DynamicCache()
    picks, tokens = [], [ids]
    with watch_routers(model) as seen:
        for step in range(how.decode + 1):
            seen.clear()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            layers = [r.picks.view(*ids.shape, -1) for r in seen]
            picks.append(torch.stack(layers, 2).to(torch.uint8))
            if step < how.decode:
                ids = _sample(out.logits[:, -1], how.temperature, generator)
                tokens.append(ids)
    return torch.cat(picks, 1).numpy(), torch.cat(tokens, 1).numpy().astype(np.uint16)


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Next token ids [N, 1]; never end or padding, so that all requests are equally long."""
    logits = logits.float().clone()
    logits[:, [END_ID, PAD_ID]] = -torch.inf
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    chances = torch.softmax(logits / temperature, -1)
    return torch.multinomial(chances, 1, generator=generator)


def capture(
    model: Qwen3MoeForCausalLM, corpus: Path, per_domain: int, how: Recording, name: str
) -> ExpertTrace:
    """The trace of up to `per_domain` held-out prompts of every domain of `corpus`.

    Raises:
        ValueError: more than 256 experts, which uint8 picks cannot hold.
    """
    if model.config.num_experts > 256:
        raise ValueError(f"{model.config.num_experts} experts; this recorder holds at most 256")
    domains = read_domains(corpus)
    picks, tokens, labels = [], [], []
    for index, domain in enumerate(domains):
        rng = np.random.default_rng(how.seed + index)
        prompts = held_out_prompts(read_ids(corpus, domain, "test"), how.prompt, per_domain, rng)
        domain_picks, domain_tokens = record(model, prompts, how, how.seed + index)
        picks.append(domain_picks.reshape(-1, *domain_picks.shape[2:]))
        tokens.append(domain_tokens.reshape(-1))
        labels += [index] * len(prompts)
        print(f"{domain}: {len(prompts)} requests", file=sys.stderr)
    length = how.prompt + how.decode
    return ExpertTrace(
        topk=np.concatenate(picks),
        offsets=np.arange(len(labels) + 1, dtype=np.int64) * length,
        prompt_tokens=np.full(len(labels), how.prompt, np.int32),
        domain=np.array(labels, np.uint8),
        domains=tuple(domains),
        num_experts=model.config.num_experts,
        tokens=np.concatenate(tokens),
        model=name,
    )


def apply_control(model: Qwen3MoeForCausalLM, control: str, seed: int) -> Qwen3MoeForCausalLM:
    """The model with all weights (`untrained`) or its routers (`random-routers`) drawn anew."""
    if control not in CONTROLS:
        raise ValueError(f"unknown control {control!r}; choose from {', '.join(CONTROLS)}")
    if control == "untrained":
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(model.config).eval()
    if control == "random-routers":
        generator = torch.Generator().manual_seed(seed)
        for layer in model.model.layers:
            router = layer.mlp.gate.weight.data
            router.normal_(0, float(router.std()), generator=generator)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.capture",
        description="Record which experts held-out prompts and their continuations use.",
    )
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("corpus", type=Path, help="folder that training.tokenizer encoded")
    parser.add_argument("trace", type=Path, help="file to write (.npz)")
    parser.add_argument("--per-domain", type=int, default=110, help="requests of a domain, at most")
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=96, help="sampled tokens of a request")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", choices=CONTROLS, default="trained")
    args = parser.parse_args(argv)
    try:
        how = Recording(args.prompt, args.decode, args.temperature, args.seed)
        model = apply_control(load_model(args.model), args.control, args.seed + 1)
        name = f"{args.model.name} ({args.control})"
        trace = capture(model, args.corpus, args.per_domain, how, name)
        trace.save(args.trace)
    except (OSError, ValueError) as error:
        print(f"capture: {error}", file=sys.stderr)
        return 2
    print(f"{args.trace}: {len(trace)} requests, {trace.geometry}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
