"""The engine's ELDR settings, `additional_config["eldr"]`, and what they refuse at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from eldr.signature import FORMS

ROLES = ("prefill", "decode", "both")


class EngineConfigError(ValueError):
    """Settings that ELDR cannot run with; the message says which one and what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What this engine does for ELDR.

    Attributes:
        role: `prefill` keeps signatures, `decode` counts the experts that decode steps read,
            `both` does both (an engine that serves alone, or a test).
        admin: whether `POST /eldr/vectors` is served; off, since vLLM's API server does not
            authenticate it.
        host_store_blocks: KV blocks whose rows are kept in host memory, for prefixes that a
            connector brings back; 0 = none. A row takes L x E bytes (twice that above block
            size 255).
        window_steps: decode steps after which the window of `GET /eldr/decode?window=true`
            moves on; it spans the last one to two times that.
        signature_form: wire form of the signatures, one of `eldr.signature.FORMS`; the others
            than `exact` are smaller and lose a little.
    """

    role: str
    admin: bool = False
    host_store_blocks: int = 0
    window_steps: int = 1000
    signature_form: str = "exact"

    def __post_init__(self) -> None:
        for name, choices in (("role", ROLES), ("signature_form", FORMS)):
            value = getattr(self, name)
            if value not in choices:
                raise EngineConfigError(
                    f'additional_config["eldr"]: {name} must be one of {", ".join(choices)}, '
                    f"got {value!r}"
                )

        if not isinstance(self.admin, bool):
            raise EngineConfigError(
                f'additional_config["eldr"]: admin must be true or false, got {self.admin!r}'
            )

        for name, least in (("host_store_blocks", 0), ("window_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise EngineConfigError(
                    f'additional_config["eldr"]: {name} must be an integer >= {least}, '
                    f"got {value!r}"
                )

    @property
    def signatures(self) -> bool:
        """Whether prompts get signatures."""
        return self.role != "decode"

    @property
    def decode(self) -> bool:
        """Whether decode steps are counted."""
        return self.role != "prefill"


def read(additional_config: Mapping[str, Any]) -> EngineConfig:
    """Reads `additional_config["eldr"]`; an unknown or missing key is an error."""
    settings = additional_config["eldr"]
    if not isinstance(settings, Mapping):
        raise EngineConfigError(
            'additional_config["eldr"]: expected an object such as {"role": "prefill"}, '
            f"got {type(settings).__name__}"
        )
    known = {field.name for field in fields(EngineConfig)}
    if unknown := sorted(set(settings) - known):
        raise EngineConfigError(
            f'additional_config["eldr"]: unknown key {unknown[0]!r}; '
            f"known: {', '.join(sorted(known))}"
        )
    if "role" not in settings:
        raise EngineConfigError(
            f'additional_config["eldr"]: role is missing, one of {", ".join(ROLES)}'
        )
    return EngineConfig(**settings)


def check(vllm_config: Any) -> None:
    """Refuses, before weights are loaded, what ELDR cannot run with.

    Args:
        vllm_config: vLLM's VllmConfig. Draft models and the parts of a multi-modal model
            are configured through views of the same class; their model is not ELDR's.

    Raises:
        EngineConfigError: wrong settings, a model without routed experts, or a kind of
            parallelism whose ranks see only a part of a request's hits.
    """
    read(vllm_config.additional_config)
    _check_parallel(vllm_config.parallel_config)
    _check_compiled(vllm_config)
    model = vllm_config.model_config
    if model is None or model.runner_type == "draft" or not model.hf_config.architectures:
        return
    if model.runner_type != "generate":
        raise EngineConfigError(
            f"ELDR routes decoding, but {model.model} runs as {model.runner_type!r}; "
            'remove "eldr" from additional_config'
        )
    if not model.is_moe:
        raise EngineConfigError(
            f"ELDR needs a mixture-of-experts model, but {model.model} "
            f"({model.hf_config.model_type}) has no routed experts; "
            'remove "eldr" from additional_config'
        )


def _check_parallel(parallel: Any) -> None:
    refused = {
        "pipeline parallelism (each rank routes other layers)": (
            parallel.pipeline_parallel_size > 1,
            "--pipeline-parallel-size 1",
        ),
        "decode context parallelism (KV blocks are split over ranks)": (
            parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size 1",
        ),
        "prefill context parallelism (each rank routes other tokens)": (
            parallel.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size 1",
        ),
        "micro-batching (both halves of a batch would share one id buffer)": (
            parallel.use_ubatching,
            "no --enable-dbo, --ubatch-size 0",
        ),
    }
    for what, (found, remedy) in refused.items():
        if found:
            raise EngineConfigError(f"ELDR does not support {what}; use {remedy}")


def _check_compiled(vllm_config: Any) -> None:
    """Beside an accelerator the MoE layer is opaque to torch.compile; on a CPU it is not."""
    compiled = bool(vllm_config.compilation_config.mode)
    if compiled and vllm_config.device_config.device_type == "cpu":
        raise EngineConfigError(
            "ELDR cannot see routing that torch.compile traced, as vLLM does on a CPU; "
            "use --enforce-eager"
        )
