"""Random calibrations with arrays of consistent shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.policies.calibration import Calibration

floats = st.floats(-1e6, 1e6, width=32)
shares = st.floats(0, 1, width=32)
abouts = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=8), max_size=3)


def arrays(shape: tuple[int, ...], elements: st.SearchStrategy[Any] = floats) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.float32, shape, elements=elements)


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    layers, experts, hidden = (draw(st.integers(1, most)) for most in (5, 9, 7))
    used = draw(st.integers(1, experts))
    counts = hnp.arrays(np.int64, (layers, experts), elements=st.integers(0, 2**40))
    steps = draw(st.integers(2, 5))
    kept = draw(arrays((layers, steps, used + 1), st.floats(0.125, 1, width=32)))
    known, sparse, bounded = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    table, mlps = (layers, draw(st.integers(2, 5))), draw(st.integers(0, layers - 1))
    return Calibration(
        decode_counts=draw(counts),
        residual_logits=draw(arrays((layers - 1, experts))),
        accuracy={name: draw(arrays((layers,), shares)) for name in ("raw", "residual", "first")},
        kept=kept / kept.sum(axis=2, keepdims=True),
        gated_accuracy={n: draw(arrays((layers, steps), shares)) for n in ("raw", "residual", "first")},
        sensitivity=draw(arrays((layers,), st.floats(0, 1e6, width=32))) if known else None,
        threshold=draw(st.floats(0, 1e6)) if known else None,
        first_gate=draw(st.none() | arrays((experts, hidden))),
        hit_rates=draw(arrays((layers, experts + 1), shares)),
        magnitudes=np.sort(draw(arrays(table, st.floats(0, 1e6, width=32))), axis=1) if sparse else None,
        up="int4" if sparse else "",
        mlp_inner=draw(arrays((mlps, 3, hidden))) if mlps else None,
        mlp_outer=draw(arrays((mlps, experts, 3))) if mlps else None,
        mlp_history=draw(arrays((mlps, experts, mlps * experts))) if mlps else None,
        mlp_accuracy=draw(arrays((mlps,), shares)) if mlps else None,
        max_loss=draw(st.floats(0, 1e3)) if bounded else None,
        sparsity=draw(st.floats(0, 0.95)) if bounded else None,
    )
