"""A row of figures for each policy, of measurements, sweeps and replays alike, and the tables and panels that
show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.bench.profile import ChannelFigures
from launch.bench.prompts import Perplexity
from launch.terminal.format import alike, percent, three_digits
from launch.terminal.plot import Panel, Series
from launch.terminal.tables import Column, Table, dim, each, policy_name, spreads
from pipeline.policies.view import PolicyRequest

KINDS = ("skipped", "substituted", "stale", "predicted")  # of approximation, beside `left`
# Why bytes were copied, as a plot names and colours it.
CAUSES = {
    "a step waited for it": "#c0504d",
    "prefetched too late": "#e39b6d",
    "prefetched and used": "#5b9a68",
    "prefetched, not used": "#b9b9b9",
    "replaced in the background": "#7d9cc0",
}
# Without `predicted`: it counts experts that a predictor chose, and their result need not differ.
CHANGES = {
    "skipped": ("expert skipped", "#8c6bb1"),
    "substituted": ("another expert instead", "#b59ad0"),
    "stale": ("from the layer before's input", "#d9a441"),
    "left": ("left", "#7a9e7e"),
}
GREEN = "#5b9a68"


@dataclass(frozen=True)
class Figures:
    """One policy's figures in one setting, measured or replayed; of decode unless it says otherwise. Speeds
    have a value for each round; bytes are per token, the rest are shares. None: not known."""

    request: PolicyRequest
    exact: bool
    prefill: Sequence[float]  # tok/s
    decode: Sequence[float]
    prefill_ratio: float | None  # to the first policy; None for the only one
    decode_ratio: float | None
    copied: float  # to the device
    moved: dict[str, float]  # `demanded`, `predicted`; `useful`, `late`, `wasted` of them; `placed`
    hits: float | None  # of needed experts
    tile_hits: float | None
    host_share: float  # of expert tiles
    issued: float | None  # of wanted prefetches
    busy: dict[str, float]  # of time: `host`, `device` and, where it is known, `link`
    waits: dict[str, float]  # of time: `workers`, `link`
    fidelity: dict[str, float | None]  # of routed weight, by kind
    first_token: Sequence[float] = ()  # milliseconds
    whole: float | None = None  # tok/s of a whole token, estimated
    kept: float | None = None  # channels read, where masks leave some out
    channels: ChannelFigures | None = None
    perplexity: Perplexity | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of a sweep

    @property
    def used(self) -> float | None:
        """The share of the prefetched bytes that was used."""
        predicted = self.moved["predicted"]
        return self.moved["useful"] / predicted if predicted else None


def _ratios(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _added(perplexity: Perplexity) -> str:
    """By how much an approximation raises the perplexity."""
    added = perplexity.percent
    return f"{added:+.2f}%" if abs(added) < 9.995 else f"{added:+.0f}%"


def _share(
    title: str, value: Callable[[Figures], Any], note: str = "", optional: bool = True, digits: int = 0
) -> Column[Figures]:
    return Column(title, value, each(lambda share: percent(share, digits)), note=note, optional=optional)


def _size(title: str, value: Callable[[Figures], float | None], note: str = "") -> Column[Figures]:
    return Column(title, value, lambda sizes: alike([size / 1e6 for size in sizes]), note=note, optional=True)


def _changed(kind: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.fidelity[kind]


BUSY = "busy, waiting: shares of decode's time; the device computes attention, resident experts and the head"
TILES = "tile hits: the same of their tiles, where experts are resident in part"
ISSUED = (
    "prefetches issued: share of the experts that a prediction named, and that were neither resident nor"
    " under way, whose copy was ordered"
)
CHANGED = "skipped, substituted, stale, predicted: shares of the routed weight"
LEFT = "left: the same in channels that were left out, by |u|"
CHANNELS = (
    "experts, channels predicted: shares of those that a layer used, named by the layer before; of these"
    " used: share of the channels that predictions copied"
)
RESIDENT = "expert hits: share of the needed experts that were resident, in decode"
SHARED = "workers' share: of decode's expert tiles; the device computed the others"

POLICY = Column[Figures]("policy", lambda f: policy_name(f.request), text=True)
COPIED = _size("copied\nMB/token", lambda f: f.copied, "copied: to the device in decode")
HITS = _share("expert\nhits", lambda f: f.hits, RESIDENT, optional=False)
HOST = _share("workers'\nshare", lambda f: f.host_share, SHARED, optional=False)
SPEEDS = (
    Column[Figures]("policy", lambda f: policy_name(f.request, f.exact), text=True),
    Column[Figures]("prefill\ntok/s", lambda f: f.prefill or None, spreads),
    Column[Figures]("x", lambda f: f.prefill_ratio, _ratios, optional=True),
    Column[Figures]("first\ntoken ms", lambda f: f.first_token or None, spreads, optional=True),
    Column[Figures]("decode\ntok/s", lambda f: f.decode or None, spreads, style="bold"),
    Column[Figures]("x", lambda f: f.decode_ratio, _ratios, style="bold", optional=True),
    Column[Figures]("whole\ntoken", lambda f: f.whole, each(three_digits), optional=True),
    COPIED,
    HOST,
)
SWEPT = (*SPEEDS[:2], *SPEEDS[4:6], COPIED, HITS, HOST)  # behind the settings
CACHE = (
    POLICY,
    HITS,
    _share("tile\nhits", lambda f: None if f.tile_hits == f.hits else f.tile_hits, TILES),
    _size("on demand\nMB/token", lambda f: f.moved["demanded"] or None, "on demand: a step waited for it"),
    _size(
        "prefetched\nMB/token", lambda f: f.moved["predicted"] or None, "prefetched: before a step needed it"
    ),
    _share("of it\nused", lambda f: f.used),
    _share("prefetches\nissued", lambda f: f.issued, ISSUED),
    _size(
        "replaced\nMB/token",
        lambda f: f.moved["placed"] or None,
        "replaced: in the background, by replacement",
    ),
)
TIMES = (
    POLICY,
    _share("workers\nbusy", lambda f: f.busy["host"], BUSY, optional=False),
    _share("device\nbusy", lambda f: f.busy["device"], optional=False),
    _share("link\nbusy", lambda f: f.busy.get("link")),
    _share("waiting for\nworkers", lambda f: f.waits["workers"], optional=False),
    _share("waiting for\ncopies", lambda f: f.waits["link"] or None),
)
APPROXIMATION = (
    POLICY,
    *(_share(kind, _changed(kind), CHANGED, False, 1) for kind in KINDS),
    _share("left", lambda f: f.fidelity["left"] or None, LEFT, digits=1),
    _share("channels\nread", lambda f: f.kept, "channels read: share of the experts'"),
    _share("experts\npredicted", lambda f: f.channels and f.channels.experts, CHANNELS),
    _share("channels\npredicted", lambda f: f.channels and f.channels.recall),
    _share("of these\nused", lambda f: f.channels and f.channels.used),
    Column[Figures]("added\nperplexity", lambda f: f.perplexity, each(_added), optional=True),
)


def policy_tables(rows: Sequence[Figures], emulation: str = "") -> list[Table[Figures]]:
    """Speeds; hits and copies; where the time went; what was approximated, by the approximate policies."""
    tables = [
        Table(SPEEDS, rows, f"emulation: {emulation}" if emulation else "", gap=0),
        Table(CACHE, rows),
        Table(TIMES, rows),
    ]
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
    """What the columns `x` and the perplexities are relative to."""
    lines = [f"x: speed relative to {rows[0].request.label}"] if rows[0].decode_ratio is not None else []
    judged = next((row.perplexity for row in rows if row.perplexity), None)
    if judged is not None:
        lines.append(f"perplexity: relative to {judged.policy}, {judged.tokens} decoded tokens")
    return lines


def policy_panels(rows: Sequence[Figures]) -> list[list[Panel]]:
    """A row of bars for each policy: speeds; hits, bytes copied by cause, approximation."""
    names = ["\n".join(row.request.label.split(" ")) for row in rows]
    hits = {name: [100 * (row.hits or 0.0)] for name, row in zip(names, rows, strict=True)}
    causes = [_by_cause(row) for row in rows]
    below = [
        Panel(
            "needed experts that were on the device, %",
            [Series("", hits, GREEN)],
            words={name: percent(row.hits) for name, row in zip(names, rows, strict=True)},
            end=118,
        ),
        Panel(
            "copied to the device in decode, MB/token",
            [
                Series(
                    cause, {name: [of[cause] / 1e6] for name, of in zip(names, causes, strict=True)}, color
                )
                for cause, color in CAUSES.items()
            ],
        ),
    ]
    if not all(row.exact for row in rows):
        below.append(_changes(names, rows))
    return [
        [
            Panel(title, [Series("", dict(zip(names, values, strict=True)))])
            for title, values in {
                "prefill, tok/s": [row.prefill for row in rows],
                "time to the first token, ms": [row.first_token for row in rows],
                "decode, tok/s": [row.decode for row in rows],
            }.items()
        ],
        below,
    ]


def _by_cause(row: Figures) -> dict[str, float]:
    """Bytes a token by the keys of CAUSES; they add up to all that was copied."""
    moved = row.moved
    late, used = min(moved["late"], moved["demanded"]), min(moved["useful"], moved["predicted"])
    sizes = (moved["demanded"] - late, late, used, moved["predicted"] - used, moved["placed"])
    return dict(zip(CAUSES, sizes, strict=True))


def _changes(names: Sequence[str], rows: Sequence[Figures]) -> Panel:
    shares = [{kind: 100 * (row.fidelity[kind] or 0.0) for kind in CHANGES} for row in rows]
    words = {}
    for name, row, of in zip(names, rows, shares, strict=True):
        words[name] = (
            "exact" if row.exact else " + ".join(f"{share:.1f}" for share in of.values() if share) or "0"
        )
        if row.perplexity is not None:
            words[name] += f"   (perplexity {row.perplexity.percent:+.2f}%)"
    return Panel(
        "computed otherwise than routed, % of the weight",
        [
            Series(label, {name: [of[kind]] for name, of in zip(names, shares, strict=True)}, color)
            for kind, (label, color) in CHANGES.items()
        ],
        words=words,
        end=max(1.0, 2.4 * max(sum(of.values()) for of in shares)),
    )
