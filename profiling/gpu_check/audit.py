"""No hidden waits: the ops under torch's synchronisation check, and captured as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from profiling.gpu_check.backends import Implementation
from profiling.gpu_check.clock import Call
from profiling.gpu_check.device_timer import captured
from profiling.gpu_check.inputs import (
    Question,
    Step,
    accumulate_arguments,
    copied,
    decide_arguments,
)
from profiling.gpu_check.parity import Verdict

STEP = Step(512, 48, 128, 8, 16)
QUESTION = Question(8, 16, 48, 128, 20, cached_blocks=200)
REPLAYS = 3


def check_synchronisation(
    name: str, ops: dict[str, Implementation], device: torch.device
) -> Iterator[Verdict]:
    """Calls each op once to compile it, then again where any synchronisation raises."""
    calls = {
        "accumulate_hits": accumulate_arguments(STEP, device, 0),
        "decide": decide_arguments(QUESTION, device, 0),
    }
    for op, arguments in calls.items():
        if op not in ops:
            continue
        ops[op](*arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops[op](*arguments)
            wrong = ""
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield Verdict(op, name, "no synchronisation", wrong)


def check_capture(
    name: str,
    ops: dict[str, Implementation],
    device: torch.device,
    capture: Callable[[Call], Call] = captured,
) -> Verdict:
    """The pipeline of a step, accumulate then decide with assignment, captured and replayed.

    Replays change the loads, as the eager calls beside them do; both must end alike.
    """
    case = f"graph of the pipeline, {REPLAYS} replays"
    step, question = accumulate_arguments(STEP, device, 1), decide_arguments(QUESTION, device, 1)
    rows = step[3]
    assert isinstance(rows, Tensor)
    question[0] = torch.zeros((200, *rows.shape[1:]), dtype=rows.dtype, device=device)
    question[0][: len(rows)] = rows
    step[3] = question[0]
    eager_question = copied(question)
    eager_step = [*copied(step)[:3], eager_question[0]]

    def pipeline(step_arguments: list[object], question_arguments: list[object]) -> None:
        ops["accumulate_hits"](*step_arguments)
        ops["decide"](*question_arguments)

    pipeline(copied(step), copied(question))  # compiles what must be compiled
    torch.cuda.synchronize()
    try:
        replay = capture(lambda: pipeline(step, question))
    except RuntimeError as error:
        return Verdict("pipeline", name, case, str(error).splitlines()[0])
    for _ in range(REPLAYS):
        replay()
        pipeline(eager_step, eager_question)
    torch.cuda.synchronize()
    different = [
        i
        for i, (a, b) in enumerate(zip(question, eager_question, strict=True))
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a, b)
    ]
    wrong = f"arguments {different} differ from eager calls" if different else ""
    return Verdict("pipeline", name, case, wrong)
