"""The report of a comparison of policies: a row of figures for each, of measurements, sweeps and replays
alike, the tables and panels that show them, and the JSON object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.bench.measure import Perplexity, PolicyResult
from launch.profile import PhaseProfile, shown_hits
from launch.terminal.format import alike, count, merged_notes, model_name, percent
from launch.terminal.tables import Column, Table, dim, each, policy_name, spreads
from pipeline.counters import pause_note
from pipeline.energy import GPUS, MODEL, PROCESSORS
from pipeline.models.shapes import is_shape
from pipeline.policies.view import PolicyRequest
from shm.segment import byte_size

KINDS = ("skipped", "substituted", "stale", "predicted")  # of approximation, beside `left`


@dataclass(frozen=True)
class Figures:
    """One policy's figures in one setting, measured or replayed. Speeds have a value for each round."""

    request: PolicyRequest
    exact: bool
    profile: PhaseProfile  # of decode
    prefill: Sequence[float]  # tok/s
    decode: Sequence[float]
    prefill_ratio: float | None  # to the first policy; None for the only one
    decode_ratio: float | None
    first_token: Sequence[float] = ()  # milliseconds
    perplexity: Perplexity | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of a sweep
    energy: dict[str, float] = field(default_factory=dict)  # joules a token, by what was measured
    gpu: bool = True  # the device is one, perhaps an emulated or a replayed one

    @property
    def moved(self) -> dict[str, float]:
        """Bytes a token, as in PhaseProfile."""
        return {kind: size / max(self.profile.rows, 1) for kind, size in self.profile.moved.items()}

    @property
    def modelled(self) -> float | None:
        """Joules a token of decode by the model, where nothing was measured."""
        return None if self.energy else self.profile.modelled_energy(self.gpu)

    @property
    def used(self) -> float | None:
        """The share of the prefetched bytes that was used."""
        moved = self.profile.moved
        return moved["useful"] / moved["predicted"] if moved["predicted"] else None


def _ratios(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _added(perplexity: Perplexity) -> str:
    """Returns by how much an approximation raises the perplexity."""
    added = perplexity.percent
    if abs(added) < 0.005:  # and no "-0.00%"
        return "0.00%"
    return f"{added:+.2f}%" if abs(added) < 9.995 else f"{added:+.0f}%"


def _share(
    title: str, value: Callable[[Figures], Any], note: str = "", optional: bool = True, digits: int = 0
) -> Column[Figures]:
    return Column(title, value, each(lambda share: percent(share, digits)), note=note, optional=optional)


def _size(title: str, value: Callable[[Figures], float | None], note: str = "") -> Column[Figures]:
    return Column(title, value, lambda sizes: alike([size / 1e6 for size in sizes]), note=note, optional=True)


def _measured(name: str, figures: Figures) -> float | None:
    return figures.energy.get(name)


def _changed(kind: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.profile.fidelity[kind]


ENERGY = {
    PROCESSORS: "processors, gpus: joules a generated token with its prompt, of the machine, by counters",
    GPUS: "",
}
BUSY = "busy, waiting: shares of decode's time; the device computes attention, resident experts and the head"
CHANGED = "skipped, substituted, stale, predicted: shares of the routed weight"
LEFT = "left: the same in channels that were left out, by |u|"
RESIDENT = "expert hits: share of the needed experts that were resident, in decode"
SHARED = "workers' share: of decode's expert tiles; the device computed the others"

POLICY = Column[Figures]("policy", lambda f: policy_name(f.request), text=True)
COPIED = _size("copied\nMB/token", lambda f: f.profile.copied_per_token, "copied: to the device in decode")
HITS = Column[Figures]("expert\nhits", lambda f: shown_hits(f.profile.hit_rate, f.request), note=RESIDENT)
HOST = _share("workers'\nshare", lambda f: f.profile.host_share, SHARED, optional=False)
SPEEDS = (
    Column[Figures]("policy", lambda f: policy_name(f.request, f.exact), text=True),
    Column[Figures]("prefill\ntok/s", lambda f: f.prefill or None, spreads),
    Column[Figures]("x", lambda f: f.prefill_ratio, _ratios, optional=True),
    Column[Figures]("first\ntoken ms", lambda f: f.first_token or None, spreads, optional=True),
    Column[Figures]("decode\ntok/s", lambda f: f.decode or None, spreads, style="bold"),
    Column[Figures]("x", lambda f: f.decode_ratio, _ratios, style="bold", optional=True),
    COPIED,
    HOST,
)
SWEPT = (*SPEEDS[:2], *SPEEDS[4:6], COPIED, HITS, HOST)  # behind the settings
CACHE = (
    POLICY,
    HITS,
    _size("on demand\nMB/token", lambda f: f.moved["demanded"] or None, "on demand: a step waited for it"),
    _size(
        "prefetched\nMB/token", lambda f: f.moved["predicted"] or None, "prefetched: before a step needed it"
    ),
    _share("of it\nused", lambda f: f.used),
    _size(
        "replaced\nMB/token",
        lambda f: f.moved["placed"] or None,
        "replaced: in the background, by replacement",
    ),
)
TIMES = (
    POLICY,
    _share("workers\nbusy", lambda f: f.profile.host_busy, BUSY, optional=False),
    _share("device\nbusy", lambda f: f.profile.device_busy, optional=False),
    _share("link\nbusy", lambda f: f.profile.link_busy or None),
    _share("waiting for\nworkers", lambda f: f.profile.shares["workers"], optional=False),
    _share("waiting for\ncopies", lambda f: f.profile.shares["link"] or None),
    *(
        Column[Figures](f"J/token\n{name}", partial(_measured, name), alike, note=note, optional=True)
        for name, note in ENERGY.items()
    ),
    Column[Figures]("J/token\nmodelled", lambda f: f.modelled, alike, note=MODEL, optional=True),
)
APPROXIMATION = (
    POLICY,
    *(_share(kind, _changed(kind), CHANGED, False, 1) for kind in KINDS),
    _share("left", lambda f: f.profile.fidelity["left"] or None, LEFT, digits=1),
    _share("channels\nread", lambda f: f.profile.kept_share, "channels read: share of the experts'"),
    Column[Figures]("added\nperplexity", lambda f: f.perplexity, each(_added), optional=True),
)


def policy_tables(rows: Sequence[Figures]) -> list[Table[Figures]]:
    """Speeds; hits and copies; where the time went; what was approximated, by the approximate policies."""
    tables = [Table(SPEEDS, rows, gap=0), Table(CACHE, rows), Table(TIMES, rows)]
    approximate = [row for row in rows if not row.exact]
    return [*tables, Table(APPROXIMATION, approximate)] if approximate else tables


def show_tables(
    tables: Sequence[Table[Figures]], about: Iterable[str], notes: Iterable[str]
) -> Iterator[RenderableType]:
    """The tables, what they have in common, their columns' notes, and other notes."""
    for table in tables:
        yield from (table, "")
    columns = [note for table in tables for note in table.notes]
    yield from dim(dict.fromkeys([*about, *columns]))
    yield from (Text(f"note: {note}") for note in dict.fromkeys(notes))


def compared(rows: Sequence[Figures]) -> list[str]:
    """Returns what the columns `x` and the perplexities are relative to."""
    lines = [f"x: speed relative to {rows[0].request.label}"] if rows[0].decode_ratio is not None else []
    judged = next((row.perplexity for row in rows if row.perplexity), None)
    if judged is not None:
        lines.append(f"perplexity: relative to {judged.exact_policy}, {judged.tokens} decoded tokens")
    return lines


# --- of measurements ----------------------------------------------------------------------------------


def routing_notes(model: str) -> list[str]:
    """A note on hits where a model's weights, and so its routers, are random."""
    note = "random weights route at random: hits, and what depends on them, are not those of the real model"
    return [note] * is_shape(model)


SPREAD = ("prefill_tok_s", "decode_tok_s", "first_token_s")  # shown with their range


@dataclass(frozen=True)
class Report:
    """A comparison of policies. `config`: the engine and the workload, as in the JSON object."""

    config: dict[str, Any]
    results: Sequence[PolicyResult]
    emulation: str
    left_out: Sequence[PolicyResult] = ()  # policies that cannot run here

    @property
    def figures(self) -> list[Figures]:
        several = len(self.results) > 1
        return [self._figures(result, self.results[0] if several else None) for result in self.results]

    def _figures(self, result: PolicyResult, first: PolicyResult | None) -> Figures:
        return Figures(
            result.request,
            result.exact,
            result.decode(self.config["tile_bytes"]),
            prefill=result.figures("prefill_tok_s"),
            decode=result.figures("decode_tok_s"),
            prefill_ratio=None if first is None else result.ratio(first, "prefill_tok_s"),
            decode_ratio=None if first is None else result.ratio(first, "decode_tok_s"),
            first_token=[1e3 * seconds for seconds in result.figures("first_token_s")],
            perplexity=result.perplexity,
            energy=result.energy,
            gpu=self.config["device"] != "cpu" or bool(self.emulation),
        )

    def parts(self) -> Iterator[RenderableType]:
        """The report as text."""
        rows = self.figures
        return show_tables(policy_tables(rows), [*self.about, *compared(rows)], self._notes())

    @property
    def about(self) -> list[str]:
        """Returns lines about the engine and the workload."""
        c = self.config
        read, new = c["warm_up_tokens"]
        return [
            f"{model_name(c['model'], article='')} on {c['device']}"
            + (f", {c['workers']} workers" if c["workers"] is not None else "")
            + f": experts {c['format']}, backbone {c['backbone_dtype']}",
            *[f"emulation: {self.emulation}"] * bool(self.emulation),
            _cache(c),
            f"batch {c['batch']}: {count(c['prompt_len'], 'prompt token')} ({c['prompts']}),"
            f" {c['gen_len']} generated tokens, sampled",
            f"{count(c['rounds'], 'round')}, policies interleaved: median, and below it the range",
            f"warm-up before each run, for all alike: {c['batch']} x {read} other tokens, {new} generated",
            *([f"{c['machine']}, {c['when'][:10]}"] if "machine" in c else []),
        ]

    def _notes(self) -> Iterator[str]:
        yield from routing_notes(self.config["model"])
        yield from merged_notes((result.request.name, self._notes_of(result)) for result in self.results)
        yield from self.without

    def _notes_of(self, result: PolicyResult) -> list[str]:
        tree = result.decode(self.config["tile_bytes"]).tree
        paused = pause_note(tree["paused_steps"], tree["steps"])
        return [*result.notes, *([f"{result.request.name}: {paused}"] if paused else [])]

    @property
    def without(self) -> list[str]:
        """A line for each policy that cannot run here."""
        return [f"{result.request.label} left out: {result.left_out}" for result in self.left_out]

    def to_json(self) -> dict[str, Any]:
        policies = [self._to_map(result) for result in self.results]
        notes = routing_notes(self.config["model"])
        return {"config": self.config, "policies": policies, "emulation": self.emulation, "notes": notes}

    def _to_map(self, result: PolicyResult) -> dict[str, Any]:
        profile, first = result.decode(self.config["tile_bytes"]), self.results[0]
        decode = profile.to_map() | {
            "host_busy": profile.host_busy,
            "device_busy": profile.device_busy,
            "shares": profile.shares,
            "fidelity": {"exact": result.exact, **profile.fidelity},
            "channels_read": profile.kept_share,
            "perplexity": None if result.perplexity is None else result.perplexity.to_map(),
        }
        return {
            "name": result.request.name,
            "options": result.request.options,
            "exact": result.exact,
            **{name: _spread(result.figures(name)) for name in SPREAD},
            "moved_bytes_per_token": profile.copied_per_token,
            "host_share": profile.host_share,
            "prefill_ratio": result.ratio(first, "prefill_tok_s"),
            "decode_ratio": result.ratio(first, "decode_tok_s"),
            "energy": {"joules_a_token": result.energy, "modelled": self._figures(result, None).modelled},
            "notes": result.notes,
            "decode": decode,
        }


def _spread(runs: list[float]) -> dict[str, Any]:
    return {"median": median(runs), "min": min(runs), "max": max(runs), "runs": runs}


def _cache(config: dict[str, Any]) -> str:
    if config["cache_tiles"] is None:
        return "expert cache: none"
    size = byte_size(config["cache_tiles"] * config["tile_bytes"])
    share = "" if config["expert_cache"] is None else f", {percent(config['expert_cache'])} of all tiles"
    return f"expert cache: {config['cache_tiles']} tiles, {size}{share}"
