"""The models at whose shapes things are timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A mixture-of-experts model's routing, and what one expert weighs.

    Attributes:
        layers, experts, top_k: the geometry L, E, K.
        block_size: tokens per KV block, as commonly served.
        hidden, width: of one expert (three hidden x width matrices), from the published configs;
            Gemma's width and DeepSeek's sizes were not looked up again.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    block_size: int
    hidden: int
    width: int

    @property
    def cells(self) -> int:
        """L * E."""
        return self.layers * self.experts

    @property
    def expert_bytes(self) -> int:
        """bf16 weights of one expert in one layer."""
        return 3 * self.hidden * self.width * 2


MODELS = (
    Model("Qwen3-30B-A3B", 48, 128, 8, 16, 2048, 768),
    Model("GPT-OSS-120B", 36, 128, 4, 16, 2880, 2880),
    Model("Gemma-4-26B-A4B", 30, 128, 8, 16, 2816, 704),
    Model("Qwen3-235B-A22B", 94, 128, 8, 16, 4096, 1536),
    Model("DeepSeek-V3", 58, 256, 8, 64, 7168, 2048),
)

TOKENS = 8192  # of one prefill step
BLOCKS_PER_REQUEST = 128
WORKERS = 16
REQUESTS = (1, 16, 64)
