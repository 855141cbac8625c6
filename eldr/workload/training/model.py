"""The model's shape, loading it for training or capture, and watching its routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from eldr.workload.training.tokenizer import END_ID, PAD_ID

# All experts of a layer as one grouped product; `eager` would loop over them in Python.
EXPERTS = "grouped_mm"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3-MoE small enough to train on a CPU; the defaults are the bundled model.

    Attributes:
        vocabulary: tokens of the tokenizer.
        hidden: width of the residual stream.
        layers: all of them MoE layers.
        experts: routed experts of a layer.
        top_k: experts of a token.
        expert_width: units of one expert.
        heads, kv_heads, head_dim: attention.
        context: longest input.
    """

    vocabulary: int = 4096
    hidden: int = 128
    layers: int = 4
    experts: int = 64
    top_k: int = 4
    expert_width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 1024

    def config(self) -> Qwen3MoeConfig:
        """The Hugging Face configuration of this shape."""
        return Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.expert_width * self.top_k,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            moe_intermediate_size=self.expert_width,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            decoder_sparse_step=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=END_ID,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )


def new_model(shape: Shape, seed: int) -> Qwen3MoeForCausalLM:
    """An untrained float32 model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = shape.config()
    config._experts_implementation = EXPERTS
    return Qwen3MoeForCausalLM(config)


def load_model(checkpoint: Path, experts: str = EXPERTS) -> Qwen3MoeForCausalLM:
    """A checkpoint in float32, ready to run."""
    model = Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation=experts
    )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Routing:
    """What one layer's router did with one forward's tokens.

    Attributes:
        logits: float32 [tokens, E].
        picks: expert ids, int64 [tokens, K].
    """

    logits: torch.Tensor
    picks: torch.Tensor


@contextmanager
def watch_routers(model: Qwen3MoeForCausalLM) -> Iterator[list[Routing]]:
    """While open, collects a `Routing` per forward and MoE layer, in layer order; never cleared."""
    seen: list[Routing] = []

    def note(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, _weights, picks = output
        seen.append(Routing(logits, picks))

    handles = [
        layer.mlp.gate.register_forward_hook(note)
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
