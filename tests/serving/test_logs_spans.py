"""Log lines and OpenTelemetry spans."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from eldr.geometry import Geometry
from eldr.serving import logs
from eldr.serving.spans import Spans
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.rig import rig, until


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)


def test_json_lines_name_the_request(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up("info", "json")
    token = logs.request_id.set("r1")
    root.info("hello %d", 3)
    logs.request_id.reset(token)
    try:
        raise ValueError("boom")
    except ValueError:
        root.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == "hello 3"
    assert first["request_id"] == "r1"
    assert "boom" in second["exception"]
    assert second["request_id"] is None


def test_console_lines(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("warning", "console")
    root.info("not shown")
    root.warning("shown")
    assert capsys.readouterr().err.rstrip().endswith("WARNING root: shown")


@pytest.mark.parametrize(
    "header", [b"Bearer s3cret\nX: 1", b"Bearer s3cret\x01", b"Bearer s3cret" + b"x" * 20000]
)
async def test_header_that_is_no_http_is_not_logged(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], header: bytes
) -> None:
    """aiohttp quotes what it cannot read, and that may be a key with a line end at its end."""
    async with rig(1, 1) as r:
        logs.set_up("debug", "json")
        reader, writer = await asyncio.open_connection(*r.url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\n\r\n" % header
        )
        assert b" 400 " in await reader.readline()
        writer.close()
        logging.getLogger("aiohttp.server").error("something else")
    err = capsys.readouterr().err
    assert "s3cret" not in err
    assert "something else" in err


def test_pods_are_not_logged(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("debug", "console")
    logging.getLogger("kubernetes.client.rest").debug("response body: %s", "s3cret")
    assert "s3cret" not in capsys.readouterr().err


async def test_spans_are_children_of_the_clients_trace() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    async with rig([prefill], 1, policy="marginal_cost") as r:
        r.router.spans = Spans(provider.get_tracer("test"), extract)
        body = {"prompt": "x", "stream": True}
        async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as response:
            await response.read()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/completions", "eldr.prefill", "eldr.decision", "eldr.decode"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace}
    whole = spans["POST /v1/completions"]
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"
    for name in ("eldr.prefill", "eldr.decision", "eldr.decode"):
        assert spans[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[name].start_time <= spans[name].end_time <= whole.end_time
    assert spans["eldr.decision"].attributes["eldr.policy"] == "marginal_cost"
    assert spans["eldr.prefill"].end_time <= spans["eldr.decision"].start_time


async def test_span_of_a_request_that_failed_or_was_left_says_so() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with rig(1, 1, attempts=1) as r:
        r.router.spans = Spans(provider.get_tracer("test"), extract)
        r.decode[0].plan = Plan(reset="answer")
        assert (await r.complete())[0] == 502
        r.decode[0].plan = Plan(stall=1)
        async with r.client.post(
            r.url + "/v1/completions", json={"prompt": "x", "stream": True}
        ) as response:
            await response.content.readany()
        await until(lambda: len(exporter.get_finished_spans()) == 8)
    whole = [s for s in exporter.get_finished_spans() if s.name.startswith("POST")]
    assert [(s.attributes["eldr.outcome"], s.status.status_code) for s in whole] == [
        ("worker_error", StatusCode.ERROR),
        ("cancelled", StatusCode.UNSET),
    ]
