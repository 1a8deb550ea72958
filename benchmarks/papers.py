"""What the pages of `benchmarks/evidence.py` are made of: texts, replays of them on both cores, and claims.

A page has each headline of a paper with its figure, ours, and a verdict that follows from both: "reproduced",
all of ours are within a tenth of the paper's and have half of its gain; "in part", all are in its order, with
another ratio, and one has half of its gain (of shares and rates, which have no order: all are within half of
it more or less); "order alone", none has; "mixed", some are in its order; "not reproduced", none is;
"undecidable", nothing here can say, or ours go over a constant that the paper's text does not give, and reach
the paper's figure with some of its values only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import policy_of
from launch.forecast import calibration_of, timed
from launch.profile import PhaseProfile
from pipeline.calibration.observers import DropTables, TokenOrder
from pipeline.engine.driver import LayerDecision
from pipeline.models.routing import Softmax
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Gated, ModelShape, Signals
from pipeline.replay.machine import DividedText
from pipeline.replay.steps import division
from pipeline.traces.synthetic import Skew, SyntheticText
from pipeline.traces.trace import Header, Trace

Row = dict[str, Any]
Floats = NDArray[np.float64]

HISTORY = 4000  # tokens of other texts, from which drawn placements are made
WARMING = 2  # texts of 24 tokens that warm a drawn one
PREDICTORS = ("raw", "first")


class Text(NamedTuple):
    """A text to replay, and the model that it is of."""

    header: Header
    text: DividedText


def recorded(path: Path, tiles: int | None = None) -> Text:
    """Returns the text of a trace of `bench`, with its model's calibration; with experts of so many tiles.
    `bench` reads every text twice, and the second time is left out."""
    trace = Trace(path)
    steps, header = list(trace.steps()), trace.header
    rows = np.cumsum([len(step.sequences) * (step.phase == "decode") for step in steps])
    del steps[int(np.searchsorted(rows, rows[-1] / 2)) + 1 :]
    begin = division([(step.phase, step.sequences) for step in steps])
    calibration = calibration_of(header, first=True)
    if tiles is not None:
        header = replace(header, shape=replace(header.shape, tiles=tiles))
    assert calibration is not None
    return Text(header, DividedText(steps, begin, calibration.decode_counts, calibration=calibration))


def drawn(
    shape: ModelShape, skew: Skew, prompt: int, tokens: int, batch: int = 1, seed: int = 0, chunk: int = 256
) -> Text:
    """Returns routing that was drawn: texts that warm, then one with a prompt that is measured."""
    header = Header("drawn", "0" * 64, "0" * 64, shape, 1000, Softmax(shape.top_k, rescaled=True), 3)
    text = SyntheticText(header, skew, seed)
    counts = text.counts(HISTORY)
    warm = [step for _ in range(WARMING) for step in text.steps(24 if prompt else 0, 24, 24, batch)]
    return Text(header, DividedText([*warm, *text.steps(prompt, chunk, tokens, batch)], len(warm), counts))


def calibrated(text: Text, accuracy: float) -> Text:
    """Returns drawn routing with what `launch.py calibrate` would find on the texts that warm it, as far as
    the presets use it: layers are equally sensitive, and so much is predicted but of the first one."""
    header, steps = text.header, text.text.steps[: text.text.begin]
    shape, order = header.shape, TokenOrder(header.shape)
    drops, nothing = DropTables(shape, PREDICTORS), np.zeros(shape.experts, np.int32)
    for step in steps:
        order.begin(step.phase, step.sequences)
        for index, layer in enumerate(step.layers):
            gated = Gated.from_router(layer.router_routing)
            order.layer(
                LayerDecision(index, Signals(None, {}), gated, nothing, nothing), np.zeros((1, 1), np.float32)
            )
            drops.used(index, layer.router_routing)
            for after in step.layers[index + 1 : index + 2]:
                named = header.router(layer.predictions[0].astype(np.float32), index + 1)
                drops.predicted("raw", index + 1, named, after.router_routing)
        order.end()
    named_too = np.full(shape.layers, accuracy, np.float32)
    named_too[0] = 0
    known = Calibration(
        decode_counts=order.decode_counts(),
        residual_logits=np.zeros((shape.layers - 1, shape.experts), np.float32),
        accuracy={"raw": named_too},
        kept=drops.kept(),
        gated_accuracy=drops.accuracy(),
        sensitivity=np.ones(shape.layers, np.float32),
        hit_rates=order.hit_rates(),
    )
    return Text(header, replace(text.text, calibration=known, counts=known.decode_counts))


@dataclass(frozen=True)
class Job:
    """A policy over one of the texts. `policy`: as in `policy_of`."""

    text: str
    policy: str
    costs: Costs
    cache: float  # share of the experts
    labels: tuple[tuple[str, Any], ...] = ()  # of its row, beside text, policy and cache
    right: float | None = None  # as in `Replay`


TEXTS: dict[str, Text] = {}


def _run(job: Job) -> Row:
    header, text = TEXTS[job.text]
    shape = header.shape
    capacity = round(job.cache * shape.layers * shape.experts) * shape.tiles
    policy = policy_of(job.policy, text)
    planned = timed(policy)
    outcome = text.replay(header, policy, job.costs, capacity, job.right)
    prefill, decode = (PhaseProfile(outcome.measured[p], header.tile_bytes) for p in ("prefill", "decode"))
    expert = shape.layers * shape.tiles * header.tile_bytes
    of = sum(step.phase == "decode" for step in text.steps)
    return {
        **{"text": job.text, "cache": job.cache, "policy": job.policy},
        **dict(job.labels),
        **{"tok_s": decode.tok_s, "prefill": prefill.tok_s, "hits": decode.hit_rate},
        **{"joules": decode.modelled_energy(gpu=True), "prompt joules": prefill.modelled_energy(gpu=True)},
        "tile hits": decode.tile_hit_rate,
        "moved": decode.copied_per_token / expert,
        "waits": decode.shares["link"],
        "planning": planned["decode"] * decode.steps / of / (decode.seconds or inf),
    }


class Results:
    """Rows of replays, to be asked for by what they have."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def get(self, figure: str, **wanted: Any) -> list[float]:
        """That figure of all rows that have this."""
        return [row[figure] for row in self.rows if all(row[name] == v for name, v in wanted.items())]

    def ratios(self, over: str, figure: str = "tok_s", /, **wanted: Any) -> list[float]:
        """That figure of rows that have this, over the policy `over` with the same labels."""
        return [row[figure] / self._same(row, over)[figure] for row in self.rows if _has(row, wanted)]

    def _same(self, row: Row, policy: str) -> Row:
        labels = {name: v for name, v in row.items() if name not in MEASURED and name != "policy"}
        return next(r for r in self.rows if r["policy"] == policy and _has(r, labels))

    def table(self, title: str, over: str, *labels: str, figure: str = "tok_s", **wanted: Any) -> str:
        """Rows that have this, behind a title: a line for each policy, a column for each setting of these
        labels: its figure, and over `over`."""
        every = [row for row in self.rows if _has(row, wanted)]
        settings = list(dict.fromkeys(tuple(row[name] for name in labels) for row in every))
        lines = [
            [", ".join(labels), *(" ".join(map(str, setting)) for setting in settings)],
            ["---"] * (1 + len(settings)),
        ]
        for policy in dict.fromkeys(row["policy"] for row in every):
            of = {tuple(row[n] for n in labels): row for row in every if row["policy"] == policy}
            cells = [self._cell(of[one], over, figure) if one in of else "" for one in settings]
            lines.append([f"`{policy}`", *cells])
        return f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _cell(self, row: Row, over: str, figure: str) -> str:
        if figure == "hits":
            return f"{row['hits']:.0%}"
        if not over:
            return f"{row[figure]:.3g}"
        return f"{row[figure]:.3g}: {row[figure] / self._same(row, over)[figure]:.2f}"


MEASURED = (
    *("end 256", "end 512", "a kJ", "tok_s", "prefill", "hits", "moved", "waits", "planning"),
    *("joules", "prompt joules", "tile hits"),
)


def _has(row: Row, wanted: Row) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def replayed(texts: dict[str, Text], jobs: Sequence[Job]) -> Results:
    """Replay the jobs on two cores."""
    TEXTS.update(texts)
    with get_context("fork").Pool(2) as pool:
        return Results(pool.map(_run, jobs, chunksize=1))


def similarity(text: Text, seed: int = 0) -> tuple[float, float, float]:
    """The mean over layers of the cosine of what a measured text's prompt used and what its decoding used; of
    as many uses by a router that draws at random; and of what other texts used and its decoding."""
    divided, shape, rng = text.text, text.header.shape, np.random.default_rng(seed)
    counts = {"prefill": np.zeros(divided.counts.shape), "decode": np.zeros(divided.counts.shape)}
    for step in divided.steps[divided.begin :]:
        for layer, traced in enumerate(step.layers):
            counts[step.phase][layer] += traced.router_routing.workload(shape.experts)

    def at_random(like: Floats) -> Floats:
        rows = int(like[0].sum()) // shape.top_k
        drawn = rng.random((shape.layers, rows, shape.experts)).argsort(axis=2)[:, :, : shape.top_k]
        uses: Floats = (drawn[..., None] == np.arange(shape.experts)).sum(axis=(1, 2)).astype(np.float64)
        return uses

    def cosine(one: Floats, other: Floats) -> float:
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return float(np.mean((one * other).sum(axis=1) / norms))

    prompt, answer = counts["prefill"], counts["decode"]
    others = cosine(divided.counts.astype(np.float64), answer)
    return cosine(prompt, answer), cosine(at_random(prompt), at_random(answer)), others


# --- claims -------------------------------------------------------------------------------------------------

NOWHERE = "undecidable"
VISIBLE = 1.005  # more than this is more: less is not to be seen in three digits
ORDERS = {"x": 1.0, "gain": 0.0}  # where a figure of this unit changes sides
FOLDER = Path(__file__).with_name("claims")
Words = str | float | Sequence[float]


@dataclass(frozen=True)
class Claim:
    """A headline. `paper`: its figures, with inf for "more" and -inf for "less"; `ours`: none where nothing
    here can say."""

    headline: str
    paper: tuple[float, ...]
    ours: Sequence[float]
    tested: str
    unit: str = "x"  # a ratio; "gain": a difference in percent; others have no order
    open: bool = False  # ours go over a constant that the paper's text does not give

    @property
    def verdict(self) -> str:
        if not self.ours:
            return NOWHERE
        within = [self._within(one) for one in self.ours]
        if all(within):
            return "reproduced"
        reached = min(self.ours) <= max(self.paper) and max(self.ours) >= min(self.paper)
        if self.open and (any(within) or reached):
            return NOWHERE
        alike = [self._alike(one) for one in self.ours]
        if not all(alike):
            return "mixed" if any(alike) else "**not reproduced**"
        return "in part" if any(self._gained(one) for one in self.ours) else "order alone"

    def _gained(self, one: float) -> bool:
        least, order = min(self.paper), ORDERS.get(self.unit)
        return order is None or least <= order or one - order >= (least - order) / 2

    def _within(self, one: float) -> bool:
        least, most = min(self.paper), max(self.paper)
        if most == inf:
            return one > least * VISIBLE
        if least == -inf:
            return one < most / VISIBLE
        return self._gained(one) and least * 0.9 <= one <= most * 1.1

    def _alike(self, one: float) -> bool:
        least, most, order = min(self.paper), max(self.paper), ORDERS.get(self.unit)
        if inf in (most, -least):
            return self._within(one)
        if order is None:
            return least / 1.5 <= one <= most * 1.5
        return one > order + VISIBLE - 1 if least > order else one <= order

    @property
    def line(self) -> str:
        figures = " to ".join(self._figure(one) for one in self.paper if abs(one) < inf)
        if any(abs(one) == inf for one in self.paper):
            figures = "more" if self.unit == "x" else f"{'above' if inf in self.paper else 'below'} {figures}"
        ours = [self._figure(one) for one in self.ours]
        if len(ours) > 4:
            ours = [f"{self._figure(min(self.ours))} to {self._figure(max(self.ours))}"]
        shown = self._with_unit(figures), self._with_unit(", ".join(ours))
        return f"| {self.headline} | {' | '.join(shown)} | {self.verdict} | {self.tested} |"

    def _with_unit(self, figures: str) -> str:
        unit = {"x": "", "ratio": "", "gain": "%"}.get(self.unit, self.unit)
        return figures if figures in ("", "more") else f"{figures} {unit}".strip()

    def _figure(self, value: float) -> str:
        return f"{100 * value:.3g}" if self.unit in ("%", "gain") else f"{value:.3g}"


def write(
    paper: str, ours: Mapping[str, Sequence[float]], words: Mapping[str, Words], tables: Sequence[str]
) -> str:
    """Returns a paper's page. Its claims are in `claims/PAPER.md`: {name} stands for one of the words, "?"
    behind the unit for a claim that is open, "> 1" for a figure that is only said to be more, "< 1" for less,
    "-" for none. A claim without figures in `ours` is one that nothing here can say."""
    about, _, rows = (FOLDER / f"{paper}.md").read_text().partition("| key |")
    shown = {name: word if isinstance(word, str) else _listed(word) for name, word in words.items()}
    lines = ["| headline | paper | here | verdict | tested |", "|---|---|---|---|---|"]
    keys = []
    for row in rows.strip().splitlines()[2:]:
        key, headline, figures, unit, tested = row.strip("| ").split(" | ")
        keys.append(key)
        given = headline, _figures(figures), list(ours.get(key, ())), tested.format(**shown), unit.strip("?")
        lines.append(Claim(*given, open=unit.endswith("?")).line)
    if unused := ours.keys() - set(keys):
        raise ValueError(f"no claim {', '.join(unused)}")
    return "\n\n".join([about.strip().format(**shown), "\n".join(lines), *tables])


def _figures(words: str) -> tuple[float, ...]:
    known = tuple(float(word) for word in words.strip("<>- ").split(" to ") if word)
    return known + (inf,) * words.startswith(">") + (-inf,) * words.startswith("<")


def _listed(values: float | Sequence[float]) -> str:
    """Figures in words; of more than four the least and most."""
    every = [values] if isinstance(values, float) else list(values)
    return (
        f"{min(every):.3g} to {max(every):.3g}"
        if len(every) > 4
        else ", ".join(f"{one:.3g}" for one in every)
    )
