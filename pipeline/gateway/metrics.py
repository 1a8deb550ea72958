"""GET /metrics, for Prometheus: the engine's counters under names after vLLM's, and our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from pipeline.gateway.asgi import send_bytes
from pipeline.gateway.call import Call, Histogram, Service
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import ApiError, of_engine
from protocol.errors import ProtocolError
from protocol.messages import Welcome

KIND = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("prefill", "decode")
TILES = ("host", "resident", "fetched", "predicted", "useful", "wasted", "late")


async def metrics(call: Call) -> None:
    """While the engine is away, only what the gateway itself counts."""
    stats: dict[str, Any] = {}
    welcome = None
    if call.service.links.ready:
        try:
            client = await call.client()
            stats, welcome = await client.stats(), client.welcome
        except (ApiError, ProtocolError) as e:
            error = of_engine(e) if isinstance(e, ProtocolError) else e
            if error.status != 503:
                raise error from e
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(call.service, stats, welcome))
    await send_bytes(call.send, generate_latest(registry), KIND)


class _Collector:
    """One scrape's values."""

    def __init__(self, service: Service, stats: dict[str, Any], welcome: Welcome | None) -> None:
        self._service = service
        self._stats = stats
        self._welcome = welcome

    def collect(self) -> Iterator[Any]:
        yield from self._own()
        if self._stats and self._welcome is not None:
            yield from self._scheduler(self._stats["scheduler"])
            yield from self._engine(self._stats["engine"])
            yield from self._cache(self._stats.get("cache"))
            labels = {
                "model": model_name(self._welcome),
                "policy": str(self._stats["policy"]),
                "format": self._welcome.format,
                "device": self._welcome.device,
            }
            yield InfoMetricFamily("tandem_engine", "What is served.", labels)

    def _own(self) -> Iterator[Any]:
        meter, links = self._service.meter, self._service.links
        yield GaugeMetricFamily("tandem_up", "1 while the engine answers.", int(links.ready))
        yield CounterMetricFamily(
            "tandem_engine_restarts", "Restarts of the engine that the gateway has seen.", links.restarts
        )
        requests = {(path, str(status)): count for (path, status), count in sorted(meter.requests.items())}
        yield _by(("path", "status"), "tandem_http_requests", "By path and status.", requests)
        for name, text, value in (
            ("tandem_http_disconnects", "Clients that left before the end.", meter.disconnects),
            ("vllm:prompt_tokens", "Of requests over HTTP.", meter.prompt_tokens),
            ("vllm:generation_tokens", "Of answers over HTTP.", meter.answer_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens over HTTP.", meter.prompt_tokens),
            ("vllm:prefix_cache_hits", "Of these, those with KV.", meter.cached_tokens),
        ):
            yield CounterMetricFamily(name, text, value)
        ended = {(reason,): count for reason, count in sorted(meter.reasons.items())}
        yield _by(("finished_reason",), "vllm:request_success", "Answers over HTTP.", ended)
        yield _seconds("vllm:time_to_first_token_seconds", "Over HTTP.", meter.first_token)
        yield _seconds("vllm:e2e_request_latency_seconds", "Of answers over HTTP.", meter.whole)

    def _scheduler(self, scheduler: dict[str, Any]) -> Iterator[Any]:
        used = scheduler["kv_tokens_used"] + scheduler["kv_tokens_kept"]
        share = used / scheduler["kv_tokens"] if scheduler["kv_tokens"] else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", "Of all clients.", scheduler["running"])
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Of all clients.", scheduler["waiting"])
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of its tokens, 0 to 1.", share)
        for name, key in (
            ("vllm:num_preemptions", "preemptions"),
            ("tandem_requests_ended", "ended"),
            ("tandem_kv_reused_tokens", "kv_reused_tokens"),
        ):
            yield CounterMetricFamily(name, "Of all clients.", scheduler[key])

    def _engine(self, phases: dict[str, Any]) -> Iterator[Any]:
        """Yields what the engine counts by phase, and within one by kind or part."""
        given = {phase: phases[phase] for phase in PHASES}
        for name, text, key in (
            ("tandem_steps", "Of the engine.", "steps"),
            ("tandem_tokens", "Computed, of all clients.", "rows"),
            ("tandem_fetched_bytes", "Copied to the device.", "fetched_bytes"),
        ):
            yield _by(("phase",), name, text, {(p,): c[key] for p, c in given.items()})
        for name, text, key in (
            ("tandem_active_tiles", "Of routed experts.", "active_tiles"),
            ("tandem_hit_tiles", "Of them, resident on the device.", "hit_tiles"),
        ):
            yield _by(("phase",), name, text, {(p,): sum(c["layers"][key]) for p, c in given.items()})
        tiles = {(p, kind): c[f"{kind}_tiles"] for p, c in given.items() for kind in TILES}
        seconds = {(p, part): value for p, c in given.items() for part, value in c["seconds"].items()}
        fidelity = {(p, kind): value for p, c in given.items() for kind, value in c["fidelity"].items()}
        numbers = {key: value for key, value in fidelity.items() if isinstance(value, int | float)}
        kinds = ("phase", "kind")
        yield _by(kinds, "tandem_tiles", "By what computed them or why they were copied.", tiles)
        yield _by(("phase", "part"), "tandem_step_seconds", "Parts of the steps.", seconds)
        yield _by(kinds, "tandem_approximated_weight", "Routed weight by what became of it.", numbers)

    def _cache(self, cache: dict[str, Any] | None) -> Iterator[Any]:
        if cache is not None:
            yield GaugeMetricFamily("tandem_cache_tiles", "That fit the device.", cache["capacity_tiles"])
            yield GaugeMetricFamily("tandem_resident_tiles", "Now on the device.", cache["resident_tiles"])
            causes = {("demand",): cache["demanded_tiles"], ("placement",): cache["placed_tiles"]}
            yield _by(("cause",), "tandem_ordered_tiles", "Copies by cause.", causes)


def _by(labels: tuple[str, ...], name: str, text: str, values: Mapping[Any, float]) -> CounterMetricFamily:
    """Returns a counter with a value for each of these labels' values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _seconds(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
