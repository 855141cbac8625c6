"""Generated requests and worker answers: whatever comes, no exception that nobody expects.

In small, for CI; benchmarks/fuzz.py runs as many as wanted.
"""

from __future__ import annotations

import pytest

from tests.serving.fuzzing import PROPERTIES, Property, run, through_a_router


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.check.__name__)
def test_property_holds_for_generated_cases(prop: Property) -> None:
    cases = 50 * prop.weight
    assert run(prop, cases, 0) >= cases


@pytest.mark.parametrize("number", range(3))
async def test_generated_requests_through_a_whole_router(number: int) -> None:
    await through_a_router(number, 40)
