"""Answer of GET /metrics, for Prometheus: the gateway's own counts, and the engine's under names after
vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from pipeline.gateway.engine_links import EngineLinks, model_name
from protocol.messages import Welcome

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PHASES = ("prefill", "decode")
TILES = ("host", "resident", "fetched", "predicted", "useful", "wasted", "late")

disable_created_metrics()


class Meter:
    """The gateway's counters. `disconnects`: clients that left before their answer's end."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "tandem_http_requests", "By path and status.", ("path", "status"), registry=own
        )
        self.disconnects = Counter(
            "tandem_http_disconnects", "Clients that left before the end.", registry=own
        )
        self._prompt = Counter("vllm:prompt_tokens", "Of requests over HTTP.", registry=own)
        self._queried = Counter("vllm:prefix_cache_queries", "Prompt tokens over HTTP.", registry=own)
        self._cached = Counter("vllm:prefix_cache_hits", "Of these, those with KV.", registry=own)
        self.tokens = Counter("vllm:generation_tokens", "Of answers over HTTP.", registry=own)
        self._ended = Counter(
            "vllm:request_success", "Answers over HTTP.", ("finished_reason",), registry=own
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Over HTTP.", buckets=SECONDS, registry=own
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds", "Of answers over HTTP.", buckets=SECONDS, registry=own
        )

    def count(self, reason: str, prompt: int, cached: int, seconds: float) -> None:
        """Count an answer that has ended."""
        self._prompt.inc(prompt)
        self._queried.inc(prompt)
        self._cached.inc(cached)
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)


def exposition(meter: Meter, links: EngineLinks, welcome: Welcome | None, stats: dict[str, Any]) -> bytes:
    """Returns all figures in Prometheus' format. While the engine is away, without `welcome` and `stats`,
    only what the gateway itself counts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(links, welcome, stats))
    text: bytes = generate_latest(meter.registry) + generate_latest(registry)
    return text


class _Collector:
    """The engine's values in one scrape."""

    def __init__(self, links: EngineLinks, welcome: Welcome | None, stats: dict[str, Any]) -> None:
        self._links, self._welcome, self._stats = links, welcome, stats

    def collect(self) -> Iterator[Any]:
        """Yields the families of metrics."""
        yield GaugeMetricFamily("tandem_up", "1 while the engine answers.", int(self._links.ready))
        text = "Restarts of the engine that the gateway has seen."
        yield CounterMetricFamily("tandem_engine_restarts", text, self._links.restarts)
        if self._welcome is not None:
            yield from _scheduler(self._stats["scheduler"])
            yield from _speculation(self._stats["speculation"])
            yield from _engine({phase: self._stats["engine"][phase] for phase in PHASES})
            yield from _cache(self._stats.get("cache"))
            yield from _disk(self._stats.get("disk"))
            yield from _machines(self._stats.get("machines") or ())
            labels = {
                "model": model_name(self._welcome),
                "policy": str(self._stats["policy"]),
                "format": self._welcome.format,
                "device": self._welcome.device,
            }
            yield InfoMetricFamily("tandem_engine", "What is served.", labels)


def _scheduler(scheduler: dict[str, Any]) -> Iterator[Any]:
    used = scheduler["kv_tokens_used"] + scheduler["kv_tokens_kept"]
    share = used / scheduler["kv_tokens"] if scheduler["kv_tokens"] else 0.0
    yield GaugeMetricFamily("vllm:num_requests_running", "Of all clients.", scheduler["running"])
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Of all clients.", scheduler["waiting"])
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of its tokens, 0 to 1.", share)
    for name, key in (
        ("vllm:num_preemptions", "preemptions"),
        ("tandem_requests_ended", "ended"),
        ("tandem_kv_reused_tokens", "kv_reused_tokens"),
        ("tandem_kv_hits", "kv_hits"),
        ("tandem_kv_evicted_blocks", "kv_evicted_blocks"),
    ):
        yield CounterMetricFamily(name, "Of all clients.", scheduler[key])


def _speculation(guessed: dict[str, Any]) -> Iterator[Any]:
    """Yields what was guessed of next tokens, and what the steps with guesses took beyond others."""
    for name, text, key in (
        ("vllm:spec_decode_num_drafts", "Steps with guessed tokens.", "steps"),
        ("vllm:spec_decode_num_draft_tokens", "Guessed.", "drafted"),
        ("vllm:spec_decode_num_accepted_tokens", "Of these, those that came true.", "accepted"),
    ):
        yield CounterMetricFamily(name, text, guessed[key])
    text = "That steps with guesses took beyond as many without."
    yield GaugeMetricFamily("tandem_guess_seconds", text, guessed["more_seconds"])


def _engine(phases: dict[str, Any]) -> Iterator[Any]:
    """Yields what the engine counts by phase, and within one by kind or part."""
    for name, text, key in (
        ("tandem_steps", "Of the engine.", "steps"),
        ("tandem_tokens", "Computed, of all clients.", "rows"),
        ("tandem_fetched_bytes", "Copied to the device.", "fetched_bytes"),
    ):
        yield _by(("phase",), name, text, {(phase,): counts[key] for phase, counts in phases.items()})
    seconds = {(p, part): value for p, counts in phases.items() for part, value in counts["seconds"].items()}
    tiles = {(p, kind): counts[f"{kind}_tiles"] for p, counts in phases.items() for kind in TILES}
    yield _by(("phase", "part"), "tandem_step_seconds", "Parts of the steps.", seconds)
    yield _by(("phase", "kind"), "tandem_tiles", "By what computed them or why they were copied.", tiles)


def _cache(cache: dict[str, Any] | None) -> Iterator[Any]:
    if cache is not None:
        yield GaugeMetricFamily("tandem_cache_tiles", "That fit the device.", cache["capacity_tiles"])
        yield GaugeMetricFamily("tandem_resident_tiles", "Now on the device.", cache["resident_tiles"])


def _disk(disk: dict[str, Any] | None) -> Iterator[Any]:
    """Yields what happened where only some experts are in memory."""
    if disk is None:
        return
    for name, text, key in (
        ("tandem_disk_hits", "Needed experts that were in memory.", "hits"),
        ("tandem_disk_misses", "Needed experts that were not.", "misses"),
        ("tandem_disk_read_bytes", "Of experts.", "bytes"),
        ("tandem_disk_wait_seconds", "In which a layer only waited for the disk.", "waited"),
        ("tandem_disk_failures", "Experts that could not be read.", "failed"),
    ):
        yield CounterMetricFamily(name, text, disk[key])
    yield GaugeMetricFamily("tandem_disk_resident_experts", "In memory.", disk["resident_experts"])
    yield GaugeMetricFamily("tandem_disk_capacity_experts", "That fit in memory.", disk["capacity_experts"])


def _machines(machines: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yields what the coordinator knows of the other machines that hold experts."""
    for name, text, key in (
        ("tandem_machine_works", "Layers that it was asked for.", "works"),
        ("tandem_machine_asked_again", "Layers that it was asked for again.", "asked_again"),
        ("tandem_machine_waited_seconds", "Of steps, for its answers alone.", "waited_s"),
        ("tandem_machine_sent_bytes", "To it.", "sent_bytes"),
        ("tandem_machine_received_bytes", "Of it.", "received_bytes"),
    ):
        yield _by(("machine",), name, text, {(each["name"],): each[key] for each in machines})
    for name, text, value in (
        ("ready", "1 while it can be asked.", lambda each: float(each["state"] == "ready")),
        ("share", "Of each expert that it holds.", lambda each: each["share"]),
        ("round_trip_seconds", "Of its answers.", lambda each: each["round_trip_us"] / 1e6),
        ("computing_seconds", "Of these, while it computed.", lambda each: each["computing_us"] / 1e6),
    ):
        gauge = GaugeMetricFamily(f"tandem_machine_{name}", text, labels=("machine",))
        for each in machines:
            gauge.add_metric((each["name"],), value(each))
        yield gauge


def _by(labels: tuple[str, ...], name: str, text: str, values: Mapping[Any, float]) -> CounterMetricFamily:
    """Returns a counter with a value for each of these labels' values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
