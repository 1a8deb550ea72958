"""GET /metrics, for Prometheus: the engine's counters under names after vLLM's, and our own."""

from __future__ import annotations

from collections.abc import Iterator
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
from pipeline.gateway.errors import ApiError, of_engine
from pipeline.gateway.info import model_name
from protocol.errors import ProtocolError
from protocol.messages import Welcome

KIND = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("prefill", "decode")


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
        requests = CounterMetricFamily(
            "tandem_http_requests", "By path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(meter.requests.items()):
            requests.add_metric((path, str(status)), count)
        yield requests
        yield CounterMetricFamily(
            "tandem_http_disconnects", "Clients that left before the end.", meter.disconnects
        )
        ended = CounterMetricFamily("vllm:request_success", "Answers over HTTP.", labels=("finished_reason",))
        for reason, count in sorted(meter.reasons.items()):
            ended.add_metric((reason,), count)
        yield ended
        yield CounterMetricFamily("vllm:prompt_tokens", "Of requests over HTTP.", meter.prompt_tokens)
        yield CounterMetricFamily("vllm:generation_tokens", "Of answers over HTTP.", meter.answer_tokens)
        yield CounterMetricFamily(
            "vllm:prefix_cache_queries", "Prompt tokens over HTTP.", meter.prompt_tokens
        )
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Of these, those with KV.", meter.cached_tokens)
        yield _seconds("vllm:time_to_first_token_seconds", "Over HTTP.", meter.first_token)
        yield _seconds("vllm:e2e_request_latency_seconds", "Of answers over HTTP.", meter.whole)

    def _scheduler(self, scheduler: dict[str, Any]) -> Iterator[Any]:
        used = scheduler["kv_tokens_used"] + scheduler["kv_tokens_kept"]
        yield GaugeMetricFamily("vllm:num_requests_running", "Of all clients.", scheduler["running"])
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Of all clients.", scheduler["waiting"])
        share = used / scheduler["kv_tokens"] if scheduler["kv_tokens"] else 0.0
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of its tokens, 0 to 1.", share)
        yield CounterMetricFamily(
            "vllm:num_preemptions", "Of requests, of all clients.", scheduler["preemptions"]
        )
        yield CounterMetricFamily("tandem_requests_ended", "Of all clients.", scheduler["ended"])
        yield CounterMetricFamily("tandem_kv_reused_tokens", "Of all clients.", scheduler["kv_reused_tokens"])

    def _engine(self, phases: dict[str, Any]) -> Iterator[Any]:
        def by_phase(name: str, text: str, values: dict[str, float]) -> CounterMetricFamily:
            family = CounterMetricFamily(name, text, labels=("phase",))
            for phase, value in values.items():
                family.add_metric((phase,), value)
            return family

        def of(key: str) -> dict[str, float]:
            return {phase: phases[phase][key] for phase in PHASES}

        yield by_phase("tandem_steps", "Of the engine.", of("steps"))
        yield by_phase("tandem_tokens", "Computed, of all clients.", of("rows"))
        yield by_phase("tandem_fetched_bytes", "Copied to the device.", of("fetched_bytes"))
        tiles = CounterMetricFamily(
            "tandem_tiles", "By what computed them or why they were copied.", labels=("phase", "kind")
        )
        for phase in PHASES:
            for kind in ("host", "resident", "fetched", "predicted", "useful", "wasted", "late"):
                tiles.add_metric((phase, kind), phases[phase][f"{kind}_tiles"])
        yield tiles
        active = {phase: sum(phases[phase]["layers"]["active_tiles"]) for phase in PHASES}
        hits = {phase: sum(phases[phase]["layers"]["hit_tiles"]) for phase in PHASES}
        yield by_phase("tandem_active_tiles", "Of routed experts.", active)
        yield by_phase("tandem_hit_tiles", "Of them, resident on the device.", hits)
        seconds = CounterMetricFamily("tandem_step_seconds", "Parts of the steps.", labels=("phase", "part"))
        for phase in PHASES:
            for part, value in phases[phase]["seconds"].items():
                seconds.add_metric((phase, part), value)
        yield seconds
        fidelity = CounterMetricFamily(
            "tandem_approximated_weight", "Routed weight by what became of it.", labels=("phase", "kind")
        )
        for phase in PHASES:
            for kind, value in phases[phase]["fidelity"].items():
                if isinstance(value, int | float):
                    fidelity.add_metric((phase, kind), value)
        yield fidelity

    def _cache(self, cache: dict[str, Any] | None) -> Iterator[Any]:
        if cache is not None:
            yield GaugeMetricFamily("tandem_cache_tiles", "That fit the device.", cache["capacity_tiles"])
            yield GaugeMetricFamily("tandem_resident_tiles", "Now on the device.", cache["resident_tiles"])
            ordered = CounterMetricFamily("tandem_ordered_tiles", "Copies by cause.", labels=("cause",))
            ordered.add_metric(("demand",), cache["demanded_tiles"])
            ordered.add_metric(("placement",), cache["placed_tiles"])
            yield ordered


def _seconds(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
