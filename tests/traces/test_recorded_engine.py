"""An engine that records: the recorded routing equals that of transformers' model of the same weights, and a
replay counts the same hits and moves as the engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle

from launch.cli import main
from pipeline.assets import model_dir
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import Replay
from pipeline.replay.steps import summarize
from pipeline.traces.trace import Trace

pytestmark = pytest.mark.timeout(300)  # an engine starts, on a machine that may be busy

PROMPT = list(range(100, 124))
NEW = 12
TIE = 1e-3  # of two logits that rounding may exchange, float16's included


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The trace, and the tokens that it was recorded from; the last token was not computed."""
    path = tmp_path_factory.mktemp("recorded") / "run.trace"
    out = path.with_name("out.json")
    arguments = ["--format", "f32", "--backbone-dtype", "f32", "--device", "cpu", "--policy", "on-demand"]
    arguments += ["--expert-cache", "0.25", "--chunk", "64", "--workers", "1", "--record", str(path)]
    arguments += ["--max-tokens", str(NEW), "--ignore-eos"]
    words = ["generate", "--prompt-tokens", ",".join(map(str, PROMPT)), "--json", *arguments]
    with pytest.MonkeyPatch.context() as patch, out.open("w") as stdout:
        patch.setattr("sys.stdout", stdout)
        assert main(words) == 0
    answer = json.loads(out.read_text())
    path.with_name("stats.json").write_text(json.dumps(answer["stats"]))
    return path, PROMPT + answer["token_ids"]


def test_recorded_routing_is_the_models(recorded: tuple[Path, list[int]]) -> None:
    path, tokens = recorded
    trace = Trace(path)
    shape = trace.header.shape
    steps = list(trace.steps())
    assert [(step.phase, len(step.sequences)) for step in steps] == [
        ("prefill", len(PROMPT)),
        *[("decode", 1)] * (NEW - 1),
    ]
    assert len({sequence for step in steps for sequence in step.sequences}) == 1
    model = Oracle(model_dir(), torch.float32).model
    with torch.no_grad():
        outputs = model(torch.tensor([tokens[:-1]]), use_cache=False, output_router_logits=True)
    checked = 0
    for layer in range(shape.layers):
        logits = outputs.router_logits[layer].float().numpy()
        own = np.concatenate([step.layers[layer].logits for step in steps])
        assert np.allclose(own, logits, rtol=2e-3, atol=2e-3)
        experts = np.concatenate([step.layers[layer].router_routing.experts for step in steps])
        weights = np.concatenate([step.layers[layer].router_routing.weights for step in steps])
        order = np.argsort(-logits, axis=1, kind="stable")[:, : shape.top_k + 1]
        best = np.take_along_axis(logits, order, axis=1)
        clear = (best[:, :-1] - best[:, 1:]).min(axis=1) > TIE
        assert np.array_equal(experts[clear], order[clear, : shape.top_k])
        chosen = torch.softmax(torch.from_numpy(best[:, : shape.top_k]), 1).numpy()
        assert np.allclose(weights[clear], chosen[clear], atol=1e-4)
        checked += int(clear.sum())
    assert checked > 0.9 * shape.layers * (len(tokens) - 1)


def test_recorded_predictions_are_of_the_next_layers(recorded: tuple[Path, list[int]]) -> None:
    """Predictions of layer l for l + 1 resemble the logits of l + 1, and more than those for l + 3."""
    steps = list(Trace(recorded[0]).steps())
    likeness = []
    for ahead in (1, 3):
        cosines = []
        for step in steps:
            for layer in range(len(step.layers) - ahead):
                own = np.float32(step.layers[layer + ahead].logits)
                predicted = np.float32(step.layers[layer].predictions[ahead - 1])
                norms = np.linalg.norm(own, axis=1) * np.linalg.norm(predicted, axis=1)
                cosines.append(((own * predicted).sum(axis=1) / norms).mean())
        likeness.append(float(np.mean(cosines)))
    assert likeness[0] > likeness[1] > 0
    assert likeness[0] > 0.7


def test_replay_counts_the_engines_hits(recorded: tuple[Path, list[int]]) -> None:
    """on-demand's cache follows from the routing alone."""
    trace = Trace(recorded[0])
    overview = summarize(trace)
    shape = trace.header.shape
    stats = json.loads(recorded[0].with_name("stats.json").read_text())
    costs = Costs((1,), (1.0,), (1.0,), 1.0, 1.0)
    capacity = shape.layers * shape.experts * shape.tiles // 4
    policy = make_policy(PolicyRequest("on-demand"), 0)
    outcome = Replay(trace.header, policy, costs, capacity).run(trace.steps())
    assert overview.rows == {"prefill": len(PROMPT), "decode": NEW - 1}
    for phase, replayed in outcome.counters.phases.items():
        counted = stats["engine"][phase]
        for name in ("active", "hits", "active_tiles", "hit_tiles"):
            assert counted["layers"][name] == getattr(replayed, name).tolist()
        assert counted["fetched_tiles"] == replayed.fetched_tiles
    assert outcome.decode.hits.sum() > 0
