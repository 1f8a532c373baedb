"""OpenTelemetry spans of model calls, where `tracing` is set: the call, and in it the engine and the commit.

A call's span hangs on the client's (`traceparent`, or whatever propagator the process has). Names and attributes are
those of OpenTelemetry's conventions for generative AI; what was said is never among them. Who collects the spans is the
process's affair: `opentelemetry-instrument rollbook serve ...`, or an SDK set up by whoever embeds the server.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import ProxyError
from .request import Reply

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from .calls import Client


class Spans:
    """Makes them. Needs `opentelemetry-api`; without an SDK in the process they go nowhere and cost next to nothing."""

    def __init__(self) -> None:
        from opentelemetry import context, propagate, trace

        self._context, self._propagate, self._trace = context, propagate, trace
        self._tracer = trace.get_tracer("rollbook.proxy")

    def begin(self, api: str, headers: Mapping[bytes, bytes]) -> "tuple[Span, Any]":
        """A call has come: its span, current from here on in this task and those it starts, and what `end` wants."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        parent = self._propagate.extract(carrier)
        span = self._tracer.start_span(api, context=parent, kind=self._trace.SpanKind.SERVER)
        return span, self._context.attach(self._trace.set_span_in_context(span, parent))

    def end(
        self, begun: "tuple[Span, Any]", api: str, client: "Client | None", status: int, error: ProxyError | None
    ) -> None:
        """A call is over."""
        span, token = begun
        self._context.detach(token)
        if span.is_recording():
            span.set_attribute("http.response.status_code", status)
            if client is not None:
                _describe(span, api, client)
            if error is not None:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._trace.StatusCode.ERROR, error.message)
        span.end()

    def sampled(self, *, seconds: float, first_token: float | None, committed: float) -> None:
        """The engine has answered, `committed` seconds ago its event went to the log, and is durable now."""
        now = time.time_ns()
        began = now - round((seconds + committed) * 1e9)
        ended = now - round(committed * 1e9)
        span = self._tracer.start_span("engine", start_time=began)
        if first_token is not None:
            span.add_event("first token", timestamp=began + round(first_token * 1e9))
        span.end(ended)
        self._tracer.start_span("commit", start_time=ended).end(now)


def _describe(span: "Span", api: str, client: "Client") -> None:
    call = client.call
    replies: list[Reply] = call.answer
    model = call.request.model
    span.update_name(f"{api} {model}")
    span.set_attributes(
        {
            "gen_ai.operation.name": "text_completion" if api == "completions" else "chat",
            "gen_ai.provider.name": "rollbook",
            "gen_ai.request.model": model,
            "rollbook.run_id": call.session.run_id,
            "rollbook.episode_id": call.session.episode_id,
            "rollbook.task_id": call.session.task_id,
        }
    )
    if replies:
        span.set_attributes(
            {
                "gen_ai.response.id": replies[0].interaction_id,
                "gen_ai.response.finish_reasons": [reply.finish_reason for reply in replies],
                "gen_ai.usage.input_tokens": replies[0].prompt_tokens,
                "gen_ai.usage.output_tokens": sum(len(reply.output_ids) for reply in replies),
                "rollbook.policy_version": replies[-1].version,
            }
        )
