"""Random request traffic that provokes what a KV cache can do, and its driver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eldr.engine.testing.families import VOCABULARY

MARK = "#"  # ends our part of a request id; vLLM appends to it
_FIRST_TOKEN = 3  # past the special ones


@dataclass(frozen=True, slots=True)
class Arrival:
    """One planned request.

    Attributes:
        name: request id.
        step: engine step at which it arrives.
        own: its own tokens, after the inherited ones.
        parent: earlier request whose tokens it starts with, or None.
        inherit: how many of them at most.
        turn: whether the parent's output counts too (a next turn of a conversation).
        output: tokens to generate.
        asks: whether it asks for its signature.
        abort_after: steps after which it is aborted, or None.
    """

    name: str
    step: int
    own: tuple[int, ...]
    parent: str | None
    inherit: int
    turn: bool
    output: int
    asks: bool
    abort_after: int | None


@dataclass(slots=True)
class Done:
    """What came of a request."""

    prompt: list[int]
    asked: bool
    kinds: set[str]
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    signature: Any = None
    routed: Any = None


def make(rng: random.Random, requests: int, block_size: int, max_len: int) -> list[Arrival]:
    """A plan: fresh prompts, shared prefixes, twins, next turns, aborts, odd and even lengths."""
    plan: list[Arrival] = []
    step = 0
    for index in range(requests):
        step += rng.choice((0, 0, 0, 0, 1, 3))
        kind = rng.random()
        parent = rng.choice(plan[-30:]).name if plan and kind < 0.6 else None
        twin = parent is not None and kind < 0.1
        own = () if twin else _tokens(rng, _length(rng, block_size, max_len // 3))
        plan.append(
            Arrival(
                name=f"r{index}",
                step=step,
                own=own,
                parent=parent,
                inherit=max_len if twin else rng.randrange(1, max_len),
                turn=parent is not None and kind > 0.3,
                output=rng.choice(
                    (1, 1, 1, rng.randrange(2, 30), rng.randrange(2, 30), rng.randrange(30, 80))
                ),
                asks=rng.random() < 0.9,
                abort_after=rng.randrange(1, 6) if rng.random() < 0.08 else None,
            )
        )
    return plan


def _length(rng: random.Random, block_size: int, most: int) -> int:
    """Short of a block, exactly on a border, or anything."""
    kind = rng.random()
    if kind < 0.2:
        return rng.randrange(1, min(block_size, most))
    if kind < 0.4 and block_size <= most:
        return block_size * rng.randrange(1, most // block_size + 1)
    return rng.randrange(1, most)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(count))


def drive(llm: Any, plan: Sequence[Arrival], max_len: int = 384) -> dict[str, Done]:
    """Sends the plan through the engine, step by step, and collects what came of it."""
    engine = llm.llm_engine
    done: dict[str, Done] = {}
    waiting, aborts, step = list(plan), [], 0
    while waiting or engine.has_unfinished_requests():
        if waiting and not engine.has_unfinished_requests():
            step = max(step, waiting[0].step)
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            done[arrival.name] = _send(engine, arrival, done, max_len)
            if arrival.abort_after is not None:
                aborts.append((step + arrival.abort_after, arrival.name))
        for output in engine.step():
            _collect(done[output.request_id.removesuffix(MARK)], output)
        step += 1
        for _, name in [entry for entry in aborts if entry[0] <= step]:
            if not done[name].tokens:
                done[name].aborted = True
                done[name].kinds.add("aborted")
                engine.abort_request([name + MARK])
        aborts = [entry for entry in aborts if entry[0] > step]
    return done


def _send(engine: Any, arrival: Arrival, done: dict[str, Done], max_len: int) -> Done:
    from vllm import SamplingParams

    prompt, kinds = list(arrival.own), {"fresh"}
    if arrival.parent is not None:
        parent = done[arrival.parent]
        source = parent.prompt + (parent.tokens if arrival.turn else [])
        prompt = source[: arrival.inherit] + prompt
        next_turn = arrival.turn and parent.tokens and arrival.inherit > len(parent.prompt)
        kinds = {"next_turn" if next_turn else "shared_prefix" if arrival.own else "twin"}
    prompt = prompt[: max_len - arrival.output]
    params = SamplingParams(
        temperature=0,
        max_tokens=arrival.output,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"eldr": {"counts": True}}} if arrival.asks else None,
    )
    engine.add_request(arrival.name + MARK, {"prompt_token_ids": prompt}, params)
    return Done(prompt, arrival.asks, kinds)


def _collect(done: Done, output: Any) -> None:
    if not output.finished:
        return
    completion = output.outputs[0]
    done.tokens = list(completion.token_ids)
    done.routed = completion.routed_experts
    if done.routed is not None:
        done.routed = done.routed[: len(done.prompt)]
    if output.num_cached_tokens:
        done.kinds.add("prefix_hit")
    if (output.kv_transfer_params or {}).get("eldr") is not None:
        done.signature = output.kv_transfer_params["eldr"]
