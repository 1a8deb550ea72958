"""AdapMoE's page: the embedded model's routing, with a 4090's costs and with layers as slow as table 2's."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from benchmarks.evidence_commands import Commands, quarter
from benchmarks.papers import Job, recorded, replayed, write
from pipeline.policies.calibration import at_limits, drop_limits

MACHINES = ("adapmoe-slow", "adapmoe")
OFFLOADING = "mixtral-offloading:pause=0"
BASELINES = (
    OFFLOADING,
    "pre-gated:pause=0",
    "whole-layer:pause=0",
    "on-demand+belady",
    "on-demand+least-stale",
)
SETS = (f"{OFFLOADING[:18]}+sequences", f"{OFFLOADING[:18]}+random-next")


def page(c: Commands) -> str:
    """Returns AdapMoE's page."""
    calibration = c.calibration()
    threshold = quarter(calibration)
    gate, set_ = f"gate=adaptive:threshold={threshold:.3g}", f"threshold={threshold:.3g}"
    lookahead = "adapmoe:gate=own:sizes=even:pause=0"
    steps = {
        "gating": f"on-demand:{gate}",
        "prefetch": lookahead,
        "gating-sizes": f"on-demand:{gate}:sizes=dp",
        "gating-predicted": f"on-demand:{gate}:sizes=predicted",
        "prefetch-sizes": "adapmoe:gate=own:pause=0",
        "gating-prefetch": f"adapmoe:sizes=even:pause=0:{set_}",
        "all": f"adapmoe:pause=0:{set_}",
        "pauses": f"adapmoe:{set_}",
        "sixty": "adapmoe:pause=0",
    }
    texts = {"embedded": recorded(c.trace(1))}
    policies = ("on-demand", *steps.values(), *BASELINES, *SETS)
    jobs = [
        Job("embedded", policy, c.costs(machine), cache, (("machine", machine),))
        for machine, cache in product(MACHINES, (0.25, 0.5))
        for policy in (policies if cache == 0.5 else (*policies[:1], steps["all"], lookahead, *BASELINES[:2]))
    ]
    found = replayed(texts, jobs)

    def over(policy: str, baseline: str = "on-demand", **wanted: Any) -> list[float]:
        return found.ratios(baseline, policy=policy, **wanted)

    limits = drop_limits(np.asarray(calibration.sensitivity).tolist(), threshold)
    kept = at_limits(calibration.kept, limits).mean(axis=0)
    ours = {key: over(policy, cache=0.5) for key, policy in steps.items() if key not in ("pauses", "sixty")}
    ours |= {
        "offloading": over(steps["all"], OFFLOADING),
        "gated": over(steps["all"], BASELINES[1]),
        "exact": over(lookahead, BASELINES[1]),
        "fewer": [1 - float(kept @ np.arange(len(kept))) / (len(kept) - 1)],
        "predicted": [float(calibration.accuracy["raw"][1:].mean())],
        "whole": over(steps["all"], BASELINES[2], cache=0.5),
    }
    words = {
        "bound": ", ".join(f"{x:.2f}" for x in over("on-demand+belady", cache=0.5)),
        "pauses": ", ".join(f"{x:.2f}" for x in over(steps["pauses"], cache=0.5)),
        "sixty": ", ".join(f"{x:.2f}" for x in over(steps["sixty"], cache=0.5)),
    }
    tables = [
        found.table(f"{machine}: tok/s, and over on-demand", "on-demand", "cache", machine=machine)
        for machine in MACHINES
    ]
    tables.append(found.table("hits", "on-demand", "cache", figure="hits", machine=MACHINES[1]))
    return write("adapmoe", ours, words, tables)
