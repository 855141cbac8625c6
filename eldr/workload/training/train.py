"""Trains the tiny MoE on the labelled corpus, on a CPU.

    python -m eldr.workload.training.train CORPUS_DIR TOKENIZER_DIR CHECKPOINT_DIR --steps 4500

One step is `batch` sequences of `length` + 1 tokens, each from another domain while domains last.
The learning rate rises over the first steps and then follows a cosine down to a twentieth.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from eldr.workload.training.corpus import read_domains
from eldr.workload.training.model import Routing, Shape, load_model, new_model, watch_routers
from eldr.workload.training.tokenizer import Ids, read_ids


@dataclass(frozen=True, slots=True)
class Training:
    """How to train; the defaults are the bundled model's.

    Attributes:
        steps: optimiser steps; 4500 is 15 M tokens.
        batch: sequences of a step.
        length: predicted tokens of a sequence.
        rate: peak learning rate.
        warm_up: steps until the peak.
        balance: weight of the load-balancing loss.
        decay: weight decay of matrices.
        seed: of weights and batches.
    """

    steps: int = 4500
    batch: int = 12
    length: int = 288
    rate: float = 3e-3
    warm_up: int = 40
    balance: float = 0.002
    decay: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.length, self.warm_up) < 1:
            raise ValueError(f"steps, batch, length and warm_up must be positive, got {self}")

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * min(1.0, (step + 1) / self.warm_up) * (0.05 + 0.95 * cosine)


def balance_loss(layers: Sequence[Routing]) -> torch.Tensor:
    """Mean over layers of E * sum_e f_e P_e * K (Switch Transformers, eq. 4, for top-K).

    f is the share of hits of an expert, P its mean router probability; balanced routing gives K.
    """
    terms = []
    for routing in layers:
        experts = routing.logits.shape[1]
        hits = torch.bincount(routing.picks.reshape(-1), minlength=experts).float()
        share = hits / routing.picks.numel()
        mean = torch.softmax(routing.logits, dim=-1).mean(0)
        terms.append(experts * (share * mean).sum() * routing.picks.shape[1])
    return torch.stack(terms).mean()


def sample_batch(texts: Mapping[str, Ids], how: Training, rng: np.random.Generator) -> torch.Tensor:
    """Token ids int64 [batch, length + 1], from random places of random domains.

    Raises:
        ValueError: a domain is shorter than one sequence.
    """
    names = list(texts)
    rows = []
    for index in rng.choice(len(names), how.batch, replace=how.batch > len(names)):
        ids = texts[names[index]]
        if len(ids) < how.length + 2:
            raise ValueError(f"{names[index]}: {len(ids)} tokens, need {how.length + 2}")
        start = int(rng.integers(0, len(ids) - how.length - 1))
        rows.append(ids[start : start + how.length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def train(model: Qwen3MoeForCausalLM, texts: Mapping[str, Ids], how: Training) -> list[float]:
    """Trains in place; returns the cross entropy (nats a token) of every step."""
    rng = np.random.default_rng(how.seed)
    optimiser = _optimiser(model, how)
    losses: list[float] = []
    began = time.monotonic()
    model.train()
    with watch_routers(model) as seen:
        for step in range(how.steps):
            for group in optimiser.param_groups:
                group["lr"] = how.rate_at(step)
            seen.clear()
            loss, balance = _step(model, seen, sample_batch(texts, how, rng), how)
            optimiser.step()
            losses.append(loss)
            if (step + 1) % 20 == 0:
                speed = (step + 1) * how.batch * how.length / (time.monotonic() - began)
                print(
                    f"step {step + 1}/{how.steps}: loss {np.mean(losses[-20:]):.3f}, "
                    f"balance {balance:.3f}, {speed:.0f} tokens/s",
                    file=sys.stderr,
                )
    model.eval()
    return losses


def _optimiser(model: Qwen3MoeForCausalLM, how: Training) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": how.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=how.rate, betas=(0.9, 0.95))


def _step(
    model: Qwen3MoeForCausalLM, seen: list[Routing], ids: torch.Tensor, how: Training
) -> tuple[float, float]:
    """Sets the clipped gradients of one batch; returns its cross entropy and balance (1 = even)."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    balance = balance_loss(seen)
    torch.autograd.backward(loss + how.balance * balance)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item(), balance.item() / seen[0].picks.shape[1]


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, ids: Ids, length: int, most: int = 16) -> float:
    """Cross entropy (nats a token) over the first `most` sequences of held-out ids."""
    rows = min(most, len(ids) // (length + 1))
    if rows == 0:
        raise ValueError(f"{len(ids)} held-out tokens, need {length + 1}")
    cut = ids[: rows * (length + 1)].reshape(rows, length + 1)
    batch = torch.from_numpy(cut.astype(np.int64))
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.train",
        description="Train the tiny MoE on the labelled corpus.",
    )
    parser.add_argument("corpus", type=Path, help="folder that training.tokenizer encoded")
    parser.add_argument("tokenizer", type=Path, help="folder that training.tokenizer wrote")
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    parser.add_argument("--init", type=Path, help="go on from this checkpoint")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, value in asdict(Training()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    for name, value in asdict(Shape()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help=f"of a new model; default {value}")
    return parser.parse_args(argv)


def _model(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """The checkpoint to go on from, or a new model of the given shape."""
    asked = {f: getattr(args, f) for f in asdict(Shape()) if getattr(args, f) is not None}
    if args.init is None:
        return new_model(Shape(**asked), args.seed)
    if asked:
        raise ValueError(f"{', '.join(asked)}: the shape comes from --init, leave these out")
    return load_model(args.init)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        how = Training(**{f: getattr(args, f) for f in asdict(Training())})
        domains = read_domains(args.corpus)
        texts = {d: read_ids(args.corpus, d, "train") for d in domains}
        model = _model(args)
        losses = train(model, texts, how)
        held_out = {
            d: held_out_loss(model, read_ids(args.corpus, d, "test"), how.length) for d in domains
        }
        model.save_pretrained(args.checkpoint)
        AutoTokenizer.from_pretrained(args.tokenizer).save_pretrained(args.checkpoint)
    except (OSError, ValueError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    log = {"training": asdict(how), "loss": losses[::20], "test_loss": held_out}
    (args.checkpoint / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({"loss": losses[-1], "test_loss": held_out}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
