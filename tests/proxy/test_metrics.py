"""What a server counts and traces, read by the libraries that people read it with."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from proxy_serving import Served, said, serving
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Generation
from rollbook.proxy.metrics import SECONDS, Histogram, Metrics

pytestmark = pytest.mark.anyio

ADMIN = "admin-key-of-the-tests"


def answer(generation: Generation) -> list[int]:
    return said("four")


async def ask(served: Served, key: str, *, status: int = 200, **more: object) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}], **more}
    headers = {"Authorization": f"Bearer {key}", "traceparent": f"00-{7:032x}-{9:016x}-01"}
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{served.base_url}/chat/completions", json=body, headers=headers)
    assert response.status_code == status, response.text
    return response


async def scrape(served: Served, accept: str = "text/plain") -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.get(f"{served.url}/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    return response


async def test_prometheus_reads_what_happened() -> None:
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, run_id="r"), version=3) as served:
        key = (await served.client.start_session("t")).api_key
        for _ in range(3):
            await ask(served, key)
        await ask(served, key, stream=True)
        await ask(served, key, status=400, temperature=9)
        await ask(served, "sk-rb-nobody", status=401)
        text = (await scrape(served)).text
    families = {family.name: family for family in parse(text)}
    values = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert values["rollbook_requests_total", "200", "chat"] == 4
    assert values["rollbook_requests_total", "400", "chat"] == 1
    assert values["rollbook_requests_total", "401", "chat"] == 1
    assert values["rollbook_errors_total", "BadRequest"] == 1
    assert values["rollbook_errors_total", "Unauthorized"] == 1
    assert values["rollbook_tokens_total", "output"] == 4 * 5
    assert values["rollbook_tokens_total", "prompt"] > 4 * len("2 + 2?")
    for name in ("first_token", "generation", "commit"):
        assert values[f"rollbook_{name}_seconds_count",] == 4
        assert 0 < values[f"rollbook_{name}_seconds_sum",] < 4
    assert values["rollbook_request_seconds_count", "chat"] == 6
    assert values["rollbook_request_seconds_bucket", "+Inf", "chat"] == 6
    assert values["rollbook_sessions_open",] == 1
    assert values["rollbook_calls_running",] == values["rollbook_calls_waiting",] == 0
    assert values["rollbook_engine_up",] == 1
    assert values["rollbook_engine_requests", "running"] == 0
    assert values["rollbook_policy_version",] == 3
    assert values["process_resident_memory_bytes",] > 0
    assert all(family.documentation for name, family in families.items() if name.startswith("rollbook"))


async def test_who_asks_for_openmetrics_gets_it() -> None:
    async with serving(answer) as served:
        response = await scrape(served, "application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert "rollbook_requests" in {family.name for family in parse_openmetrics(response.text)}


async def test_a_client_that_left_is_counted_as_one() -> None:
    def slow(generation: Generation) -> list[int]:
        return said("x" * 50)

    async with serving(slow, config=ServeConfig(admin_key=ADMIN, grace_s=0.01), token_s=0.05) as served:
        key = (await served.client.start_session("t")).api_key
        asking = asyncio.create_task(ask(served, key))
        while not served.service.calls.running:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        asking.cancel()
        counted = 'rollbook_requests_total{api="chat",status="499"} 1.0'
        while counted not in (await scrape(served)).text:  # noqa: ASYNC110 - nor for this
            await asyncio.sleep(0.01)


def test_a_histogram_counts_each_value_once_at_its_bound() -> None:
    histogram = Histogram()
    for value in (0.0005, 0.001, 0.002, 1000.0):
        histogram.add(value)
    buckets = dict(histogram.buckets())
    assert buckets["0.001"] == 2
    assert buckets["0.0025"] == 3
    assert buckets[str(SECONDS[-1])] == 3
    assert buckets["+Inf"] == 4


def test_counting_a_call_costs_microseconds() -> None:
    metrics = Metrics()

    def once(n: int) -> float:
        began = time.thread_time()
        for _ in range(n):
            metrics.sampled(100, 50, 10, 0.1, 0.01)
            metrics.commit.add(0.002)
            metrics.answered("chat", 200, None, 0.12)
        return (time.thread_time() - began) / n

    assert min(once(2000) for _ in range(5)) < 50e-6  # about 2 on an idle machine


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Everything that ends while a test runs. The global provider can be set once only: we put it where it is read."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_call_is_a_span_of_its_clients_trace_with_engine_and_commit_in_it(spans: InMemorySpanExporter) -> None:
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, run_id="r", tracing=True), version=3) as served:
        started = await served.client.start_session("t")
        response = await ask(served, started.api_key)
        await ask(served, started.api_key, status=400, temperature=9)
    found = by_name(spans)
    call, engine, commit = found["chat m"], found["engine"], found["commit"]
    assert call.kind is trace.SpanKind.SERVER
    assert call.parent is not None
    assert call.context is not None
    assert (call.context.trace_id, call.parent.span_id) == (7, 9)
    assert call.attributes is not None
    attributes = dict(call.attributes)
    assert attributes.pop("gen_ai.usage.input_tokens") == response.json()["usage"]["prompt_tokens"]
    assert attributes == {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rollbook",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": response.json()["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 5,
        "rollbook.run_id": "r",
        "rollbook.episode_id": started.session_id,
        "rollbook.task_id": "t",
        "rollbook.policy_version": 3,
    }
    for inner in (engine, commit):
        assert inner.parent is not None
        assert inner.parent.span_id == call.context.span_id
        assert call.start_time is not None
        assert call.end_time is not None
        assert inner.start_time is not None
        assert inner.end_time is not None
        assert call.start_time - 2_000_000 <= inner.start_time <= inner.end_time <= call.end_time + 2_000_000  # ns
    assert engine.end_time == commit.start_time
    assert [event.name for event in engine.events] == ["first token"]
    refused = found["chat"]
    assert refused.status.status_code is trace.StatusCode.ERROR
    assert refused.attributes is not None
    assert refused.attributes["error.type"] == "BadRequest"


async def test_a_stream_is_a_span_too_and_without_the_setting_there_are_none(spans: InMemorySpanExporter) -> None:
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, tracing=True)) as served:
        key = (await served.client.start_session("t")).api_key
        await ask(served, key, stream=True)
    assert {"chat m", "engine", "commit"} <= by_name(spans).keys()
    spans.clear()
    async with serving(answer) as served:
        key = (await served.client.start_session("t")).api_key
        await ask(served, key)
    assert not by_name(spans)


def test_a_server_that_nobody_asks_imports_neither_library() -> None:
    code = "import sys, rollbook.proxy.server; print({'opentelemetry', 'prometheus_client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("set()", "{'opentelemetry'}")  # Litestar may bring the API along
