"""AdapMoE's page: recorded and drawn routing, with a 4090's costs and layers that take several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np

from benchmarks.evidence_commands import Commands, quarter, rtx_4090
from benchmarks.papers import Job, Row, Text, Words, calibrated, drawn, recorded, replayed, write
from pipeline.policies.calibration import at_limits, drop_limits
from pipeline.policies.replacements import layer_sizes
from pipeline.policies.view import ModelShape, View
from pipeline.traces.synthetic import PROFILES

LATENCY = 392 / 32  # ms of a layer of the paper's baseline, with half of the experts cached (table 2)
PLAIN = 0.13  # ms of a layer beside its experts by a 4090's plain costs
LINKS = (25.0, 12.0)  # GB/s of a PCIe 4.0 x16 link, from memory that is pinned and that is not
TWO_BITS = 2.5  # of a weight of `int2`, with its scales: the experts of its 4+2 bits
OFFLOADING, GATED, WHOLE = "mixtral-offloading:pause=0", "pre-gated:pause=0", "whole-layer:pause=0"
PREFETCHES = ("sequences", "random-next")
OTHERS = ("on-demand+belady", "on-demand+least-stale", *(f"mixtral-offloading+{p}" for p in PREFETCHES))
LOOKAHEAD = "adapmoe:gate=own:sizes=even:pause=0"


def steps_of(text: Text) -> dict[str, str]:
    """Returns the policies of table 2, with the gate that leaves a quarter of the tokens a single expert."""
    assert text.text.calibration is not None
    set_ = f"threshold={quarter(text.text.calibration):.3g}"
    gate = f"on-demand:gate=adaptive:{set_}"
    return {
        "gating": gate,
        "prefetch": LOOKAHEAD,
        "gating-sizes": f"{gate}:sizes=dp",
        "gating-predicted": f"{gate}:sizes=predicted",
        "prefetch-sizes": "adapmoe:gate=own:pause=0",
        "gating-prefetch": f"adapmoe:sizes=even:pause=0:{set_}",
        "all": f"adapmoe:pause=0:{set_}",
    }


def page(c: Commands) -> str:
    """Returns AdapMoE's page."""
    skew = replace(PROFILES["mixtral-8x7b"], accuracy=0.9)
    texts = {
        "embedded": recorded(c.trace(1)),
        "drawn": calibrated(drawn(ModelShape(32, 8, 4, 2), skew, 0, 32), 0.9),
    }
    steps = {name: steps_of(text) for name, text in texts.items()}
    plain = [Job(n, "on-demand", rtx_4090(gbs, PLAIN), 0.5, (("link", gbs),)) for n in texts for gbs in LINKS]
    points = {(row["text"], row["link"]): _point(row, texts) for row in replayed(texts, plain).rows}
    jobs = []
    for name, cache in product(texts, (0.5, 0.25)):
        known = steps[name]
        few = (known["all"], LOOKAHEAD, OFFLOADING, GATED)
        policies = few if cache < 0.5 else (*known.values(), *few[2:], WHOLE)
        fitted = [(link, points[name, link]) for link in LINKS]
        settings = (
            *((f"{gbs:.0f} GB/s {ms:.3g} ms", "fitted", rtx_4090(gbs, ms)) for gbs, ms in fitted),
            *((f"{LINKS[0]:.0f} GB/s {ms:.3g} ms", "other", rtx_4090(LINKS[0], ms)) for ms in (4.0, PLAIN)),
            *((f"4+2 bits {gbs:.0f} GB/s", "4+2", rtx_4090(gbs, ms, TWO_BITS)) for gbs, ms in fitted),
        )
        for number, (title, at, costs) in enumerate(settings):
            more = OTHERS if cache == 0.5 and number == 0 else ()
            every = ("on-demand", *(few if at == "4+2" else policies), *more)
            jobs += [Job(name, one, costs, cache, (("setting", title), ("at", at))) for one in every]
    found = replayed(texts, jobs)

    def over(key: str, baseline: str = "on-demand", at: str = "fitted", **wanted: float) -> list[float]:
        return [
            ratio
            for name, known in steps.items()
            for ratio in found.ratios(baseline, text=name, policy=known[key], at=at, **wanted)
        ]

    ours = {key: over(key, cache=0.5) for key in steps["drawn"]}
    ours |= {
        "offloading": over("all", OFFLOADING),
        "demand": over("all"),
        "two-bits": over("all", at="4+2"),
        "two-bits-offloading": over("all", OFFLOADING, "4+2"),
        "gated": over("all", GATED),
        "exact": over("prefetch", GATED),
        "whole": over("all", WHOLE, cache=0.5),
        "predicted": [median(_predicted(texts["embedded"]))],
        "early": [_early(texts["embedded"])],
    }
    words: dict[str, Words] = {f"{key}-other": over(key, at="other", cache=0.5) for key in steps["drawn"]}
    words |= {
        "points": list(points.values()),
        "fewer": [_fewer(text) for text in texts.values()],
        "bound": found.ratios("on-demand", policy=OTHERS[0]),
        "layers": ", ".join(f"{share:.0%}" for share in _predicted(texts["embedded"])),
    }
    tables = [
        found.table(f"{name}: tok/s, and over on-demand", "on-demand", "cache", "setting", text=name)
        for name in texts
    ]
    return write("adapmoe", ours, words, tables)


def _point(row: Row, texts: dict[str, Text]) -> float:
    """Returns the milliseconds beside its experts with which a layer takes as long as the paper's."""
    return PLAIN + LATENCY - 1e3 / float(row["tok_s"]) / texts[row["text"]].header.shape.layers


def _predicted(text: Text) -> Sequence[float]:
    """Returns the share of each layer's experts that is predicted, of the layers behind the first."""
    assert text.text.calibration is not None
    shares: list[float] = text.text.calibration.accuracy["raw"][1:].tolist()
    return shares


def _limits(text: Text) -> list[float]:
    known = text.text.calibration
    assert known is not None
    return drop_limits(np.asarray(known.sensitivity).tolist(), quarter(known))


def _fewer(text: Text) -> float:
    """Returns the percentage of a token's experts that its gate drops."""
    assert text.text.calibration is not None
    kept = at_limits(text.text.calibration.kept, _limits(text)).mean(axis=0)
    return 100 - 100 * float(kept @ np.arange(len(kept))) / (len(kept) - 1)


def _early(text: Text) -> float:
    """Returns how much more of half a cache the first quarter of the layers gets than an even share."""
    shape = text.header.shape
    none = np.zeros((shape.layers, shape.experts), np.int32)
    view = View(
        shape, "decode", 0, none, none, none.astype(np.int64), 0, None, calibration=text.text.calibration
    )
    sizes = layer_sizes(view, shape.layers * shape.experts // 2, _limits(text))
    return sum(sizes[: shape.layers // 4]) / (shape.layers // 4) / (shape.experts / 2)
