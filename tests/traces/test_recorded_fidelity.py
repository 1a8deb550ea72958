"""The fidelity that approximate presets report equals the sums over a recording of the same steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from plain_calibration import plain_calibration

from launch.cli import main
from pipeline.assets import model_dir
from pipeline.calibration.file import calibration_path, save
from pipeline.checkpoint.open import open_model
from pipeline.traces.trace import Trace
from protocol.program import user_folder

pytestmark = pytest.mark.timeout(300)  # engines start, on a machine that may be busy

LAYERS, EXPERTS, HIDDEN, USED = 8, 8, 256, 2  # of the embedded model
PROMPT = "200,201,202,203,204,205"
KINDS = ("skipped", "substituted", "stale", "predicted", "left")
RUNS = {
    "daop": (["--policy", "daop", "--set", "daop.first_layer=2"], ("substituted", "stale", "predicted")),
    "daop, not early": (
        ["--policy", "daop", "--set", "daop.first_layer=2", "--set", "daop.early=0"],
        ("substituted", "predicted"),
    ),
    "adapmoe": (["--policy", "adapmoe"], ("skipped",)),
}


@pytest.fixture(scope="module", autouse=True)
def calibrated() -> Iterator[None]:
    """An invented calibration with which about a quarter of the tokens use one expert: the test is of the
    counters."""
    random = np.random.default_rng(0)
    counts = random.integers(1, 100, (LAYERS, EXPERTS))
    fields = {"decode_counts": counts, "threshold": 0.12}
    calibration = plain_calibration(LAYERS, EXPERTS, HIDDEN, accuracy=0.8, **fields)
    path = calibration_path(user_folder("CACHE"), open_model(model_dir()))
    save(path, calibration, {})
    yield
    shutil.rmtree(path.parent)


def added_up(trace: Trace) -> dict[str, float]:
    """Shares of all routed weight, number by number."""
    tiles = trace.header.shape.tiles
    weight, sums = 0.0, dict.fromkeys(KINDS, 0.0)
    for step in trace.steps():
        for layer in step.layers:
            for row in range(len(step.sequences)):
                for slot in range(trace.header.shape.top_k):
                    routed = float(layer.router_routing.weights[row, slot])
                    done = float(layer.computed.weights[row, slot])
                    expert = int(layer.computed.experts[row, slot])
                    weight += routed
                    sums["predicted"] += routed * layer.predicted
                    if done == 0:
                        sums["skipped"] += routed
                    elif expert != layer.router_routing.experts[row, slot]:
                        sums["substituted"] += routed
                    if layer.stale is not None:
                        sums["stale"] += done * (tiles - int(layer.stale[expert])) / tiles
    return {kind: value / weight for kind, value in sums.items()}


@pytest.mark.parametrize("run", RUNS, ids=list(RUNS))
def test_fidelity_matches_the_recorded_layers(run: str, tmp_path, capsys) -> None:
    policy, present = RUNS[run]
    size = ["--expert-cache", "0.25", "--tile", "128", "--chunk", "32", "--workers", "1"]
    trace = tmp_path / "run.trace"
    words = ["generate", "--prompt-tokens", PROMPT, "--max-tokens", "24", "--ignore-eos", "--json"]
    assert main([*words, *policy, *size, "--device", "cpu", "--record", str(trace)]) == 0
    reported = json.loads(capsys.readouterr().out)["fidelity"]
    assert reported.pop("exact") is False
    assert reported == pytest.approx(added_up(Trace(trace)), rel=5e-4, abs=1e-6)  # four digits
    for kind in KINDS:
        assert (reported[kind] > 0) == (kind in present), kind
