"""What a server counts, for Prometheus: GET /metrics.

Counting is a few additions per call and knows no library; `prometheus_client` writes it down when somebody asks. What
can be asked (sessions, the engine, the policy's version) is asked then and counted nowhere.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .engine import Health

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms."""


class Histogram:
    """Counts by `SECONDS`, the last for what is above, and the sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus wants them."""
        found: list[tuple[str, float]] = []
        n = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            n += count
            found.append((bound, n))
        return found


class Metrics:
    """The counts of one server. Every method is called on its event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by API and HTTP status; 499: the client left
        self.errors: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}  # by API: from the first byte to the last
        self.first_token = Histogram()  # from the request to the engine's first token
        self.generation = Histogram()  # to its last
        self.commit = Histogram()  # from an answer to its event on disk
        self.prompt_tokens = 0
        self.shared_tokens = 0  # of those, the ones that the book had already
        self.output_tokens = 0
        self.repeated = 0  # calls that a fork answered from the record

    def answered(self, api: str, status: int, error: str | None, seconds: float) -> None:
        """A call is over, well or not."""
        self.requests[api, status] += 1
        if error is not None:
            self.errors[error] += 1
        known = self.seconds.get(api)
        if known is None:
            known = self.seconds[api] = Histogram()
        known.add(seconds)

    def sampled(self, prompt: int, shared: int, output: int, seconds: float, first_token: float | None) -> None:
        """The engine has answered."""
        self.prompt_tokens += prompt
        self.shared_tokens += shared
        self.output_tokens += output
        self.generation.add(seconds)
        if first_token is not None:
            self.first_token.add(first_token)


class Exposition:
    """A collector for `prometheus_client`: the counts, and how things stand now. gauges: name -> (help, value)."""

    def __init__(self, metrics: Metrics, health: Health, info: dict[str, str], gauges: dict[str, tuple[str, float]]):
        self._metrics, self._health, self._info, self._gauges = metrics, health, info, gauges

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        m = self._metrics
        yield InfoMetricFamily("rollbook", "What this server is", value=self._info)
        family = CounterMetricFamily(
            "rollbook_requests", "Model calls by API and HTTP status; 499: the client left", labels=["api", "status"]
        )
        for (api, status), n in sorted(m.requests.items()):
            family.add_metric([api, str(status)], n)
        yield family
        family = CounterMetricFamily("rollbook_errors", "Model calls without an answer by kind", labels=["error"])
        for error, n in sorted(m.errors.items()):
            family.add_metric([error], n)
        yield family
        family = CounterMetricFamily(
            "rollbook_tokens",
            "Tokens: prompt; shared: those of the prompts that the book had already; output",
            labels=["kind"],
        )
        for kind, n in (("prompt", m.prompt_tokens), ("shared", m.shared_tokens), ("output", m.output_tokens)):
            family.add_metric([kind], n)
        yield family
        yield CounterMetricFamily(
            "rollbook_repeated_calls", "Calls of forks answered from the record", value=m.repeated
        )
        histogram = HistogramMetricFamily("rollbook_request_seconds", "A whole model call by API", labels=["api"])
        for api, one in sorted(m.seconds.items()):
            histogram.add_metric([api], one.buckets(), one.total)
        yield histogram
        for name, help_, one in (
            ("first_token", "From the request to the engine's first token", m.first_token),
            ("generation", "From the request to the engine's last token", m.generation),
            ("commit", "From an answer to its event on disk", m.commit),
        ):
            yield HistogramMetricFamily(f"rollbook_{name}_seconds", help_, buckets=one.buckets(), sum_value=one.total)
        yield GaugeMetricFamily("rollbook_engine_up", "Whether the engine answers", value=float(self._health.is_ready))
        requests = GaugeMetricFamily("rollbook_engine_requests", "Requests that the engine has", labels=["state"])
        requests.add_metric(["running"], self._health.running)
        requests.add_metric(["waiting"], self._health.waiting)
        yield requests
        yield GaugeMetricFamily("rollbook_policy_version", "The version that answers", value=self._health.version)
        for name, (help_, value) in self._gauges.items():
            yield GaugeMetricFamily(f"rollbook_{name}", help_, value=value)


def exposition(collector: Exposition, accept: str) -> tuple[bytes, str]:
    """The text of /metrics in the format that the asker takes, and its content type; the process's own come along."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Families:
    """A collector of families that are there already."""

    def __init__(self, families: dict[str, Any]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        yield from self._families.values()


def merged(texts: dict[int, str], accept: str) -> tuple[bytes, str]:
    """What several workers say as one exposition, in the format that the asker takes: each series has the label
    `worker`, from 1. texts: in Prometheus' own format, by worker from 0."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            samples = [s._replace(labels={**s.labels, "worker": str(worker + 1)}) for s in family.samples]
            family.samples = []
            families.setdefault(family.name, family).samples += samples
    registry = CollectorRegistry()
    registry.register(_Families(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
