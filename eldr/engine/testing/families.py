"""Tiny MoE checkpoints of several families, with random weights: the shapes that routing takes.

They differ where ELDR could go wrong: grouped and biased top-k, dense first layers, latent
attention, more than one KV cache group, sinks and sliding windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Family -> (transformers' configuration class, its arguments beyond the common ones).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **_SLIDING,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 1.0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "global_head_dim": 32,
            "intermediate_size": 128,
            "enable_moe_block": True,
            "moe_intermediate_size": 32,
            "num_experts": 16,
            "top_k_experts": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            **_SLIDING,
        },
    ),
    # Not an MoE: what the engine hook refuses.
    "llama": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128},
    ),
}
MOE = tuple(name for name in _FAMILIES if name != "llama")


def cache_groups(family: str) -> int:
    """KV cache groups of the family: two where some layers' attention slides."""
    return 2 if "layer_types" in _FAMILIES[family][1] else 1


def reference_latent_attention(family: str) -> bool:
    """Whether it has MLA and this CPU no AMX tiles.

    vLLM then takes a reference backend: blocks of 16, whole prompts, no prefix caching.
    """
    import torch

    amx = torch.cpu._is_amx_tile_supported()  # what vLLM asks
    return "kv_lora_rank" in _FAMILIES[family][1] and not amx


def make(family: str, folder: Path, seed: int = 1) -> Path:
    """Writes a checkpoint (bfloat16, 4 layers, no tokenizer) and returns its directory.

    Weights are Gaussian with variance 1/fan-in and routers four times as strong, so that routing
    depends on the token, which a default initialisation hardly makes it do. Selection biases
    are random too.
    """
    import torch
    import transformers

    kind, own = _FAMILIES[family]
    config = getattr(transformers, kind)(**{**_COMMON, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise / weight.shape[-1] ** 0.5)
                if weight.dim() == 2 and ("gate.weight" in name or "router" in name):
                    weight.mul_(4.0)
        for name, bias in model.named_buffers():
            if "correction_bias" in name:
                bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    target = folder / family
    model.to(torch.bfloat16).save_pretrained(target)
    return target
