"""The recorder of a whole engine: the header names its model and store, and each step has its own rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from whole_engine import whole_engine

from pipeline.traces.recorder import DEPTH, UNSIMULATED, recorder_of
from pipeline.traces.trace import Header, Trace


def test_trace_of_a_whole_engine(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with whole_engine(tiny_model, tmp_path) as whole:
        whole.policies(policy="on-demand")
        parts = whole.parts
        engine = parts.engine
        spent: list[tuple[float, float]] = []  # on what a replay leaves out, and in all, before each step
        first = recorder_of(whole.config, parts.source, engine, path)
        second = None
        for _ in range(3):
            seconds = engine.counters.phases["prefill"].seconds
            rest = sum(sum(seconds[part]) for part in UNSIMULATED)
            spent.append((rest, sum(map(sum, seconds.values()))))
            if len(spent) == 3:  # the coordinator was restarted
                first.close()
                second = recorder_of(replace(whole.config, generation=1), parts.source, engine, path)
            engine.observers[:] = [second or first]
            whole.prefill()
        assert second is not None
        assert second.probes(0) == (1,)
        assert second.probes(1) == (), "no gate for the next token's first layer"
        second.close()
        wanted = Header(
            model=str(tiny_model),
            fingerprint=parts.source.fingerprint("calibration", 0),
            store=whole.config.fingerprint,
            shape=engine.shape,
            tile_bytes=engine.layout.tile_bytes,
            router=engine.backbone.router_math,
            depth=DEPTH,
        )
        after = engine.counters.phases["prefill"].seconds
        spent.append((sum(sum(after[part]) for part in UNSIMULATED), sum(map(sum, after.values()))))
    trace = Trace(path)
    assert trace.header == wanted
    steps = list(trace.steps())
    assert [(step.number, step.phase, len(step.sequences)) for step in steps] == [
        (number, "prefill", 2) for number in range(3)
    ]
    assert len({sequence for step in steps for sequence in step.sequences}) == 3
    for step, (before, _), (behind, _) in zip(steps, spent, spent[1:], strict=False):
        # of sequences that have just begun: what the engine spent, less the recorder's own time
        assert 0 < step.rest <= behind - before + 1e-6
    counts = sum(step.layers[0].router_routing.workload(engine.shape.experts) for step in steps)
    assert np.array_equal(engine.popularity[0], counts)
