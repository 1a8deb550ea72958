"""`launch.py calibrate`: its arrays against transformers' on the same text; its figures and errors."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Launched, launch
from transformers import AutoModelForCausalLM
from waiting import wait_until

from launch.calibrate import PARTS, _lines, _parts
from launch.terminal.tables import render
from pipeline.assets import heldout, model_dir
from pipeline.calibration.file import calibration_path, load
from pipeline.calibration.measure import BOUND
from pipeline.calibration.reading import Division, Window
from pipeline.checkpoint.open import open_model
from pipeline.policies.calibration import Calibration
from pipeline.text.tokenizer import Tokenizer
from protocol.program import user_folder

CHARACTERS = 3000  # of held-out text: about 900 tokens
TIES = 0.002  # share of the routings that rounding may change


@dataclass(frozen=True)
class Calibrated:
    """One run, and the division of its text."""

    summary: dict[str, Any]
    calibration: Calibration
    division: Division


def divided(tokens: list[int]) -> Division:
    return Division.of(tokens, 1024, 8192)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrated]:
    folder = tmp_path_factory.mktemp("calibrate")
    text = heldout()["english"].read_text()[:CHARACTERS]
    (folder / "text").write_text(text)
    exact = ["--format", "f32", "--backbone-dtype", "f32", "--log-level", "error"]
    words = ("--text", str(folder / "text"), "--json", *exact)
    done = launch("calibrate", *words, limit=110)
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    summary = json.loads(done.stdout)
    path = calibration_path(user_folder("CACHE"), open_model(model_dir()))
    assert Path(summary["path"]) == path
    calibration = load(path)
    yield Calibrated(summary, calibration, divided(tokenizer.encode(text)))
    shutil.rmtree(path.parent)  # other tests expect a model without a calibration


class Oracle:
    """The inputs x [L, T, H] of every router, by transformers; each router is a matrix [E, H]."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir(), dtype=torch.float32, experts_implementation="eager"
        ).eval()
        layers = self.model.model.layers
        self.routers = [layer.mlp.gate.weight.detach().numpy() for layer in layers]
        self._x: list[np.ndarray] = []
        for layer in layers:
            layer.post_attention_layernorm.register_forward_hook(
                lambda module, inputs, x: self._x.append(x[0].numpy().copy())
            )

    @torch.no_grad()
    def inputs(self, window: Window) -> np.ndarray:
        self._x.clear()
        self.model(torch.tensor([window.tokens]), use_cache=False)
        return np.stack(self._x)


@pytest.fixture(scope="module")
def seen(calibrated: Calibrated) -> dict[str, Any]:
    """The oracle's arrays: x of each training window and each validation window, and the routers."""
    oracle = Oracle()
    division = calibrated.division
    return {
        "training": [oracle.inputs(window) for window in division.training],
        "validation": [oracle.inputs(window) for window in division.validation],
        "routers": oracle.routers,
    }


def two_best(logits: np.ndarray) -> np.ndarray:
    return np.argsort(-logits, axis=-1, kind="stable")[..., :2]


def counts_of(x: np.ndarray, routers: list[np.ndarray], rows: slice) -> np.ndarray:
    """[L, E]"""
    return np.stack(
        [
            np.bincount(two_best(layer[rows] @ router.T).ravel(), minlength=len(router))
            for layer, router in zip(x, routers, strict=True)
        ]
    )


def accuracy(predicted: np.ndarray, used: np.ndarray) -> float:
    """Share of the used experts that were predicted; both [T, 2]."""
    return float(np.mean([np.isin(u, p).mean() for p, u in zip(predicted, used, strict=True)]))


def test_activation_counts_equal_the_oracle_s(calibrated: Calibrated, seen: dict[str, Any]) -> None:
    windows = calibrated.division.training + calibrated.division.validation
    every = list(zip(windows, seen["training"] + seen["validation"], strict=True))
    found = calibrated.calibration.decode_counts
    expected = sum(counts_of(x, seen["routers"], slice(w.prefill, None)) for w, x in every)
    assert (found.sum(axis=1) == expected.sum(axis=1)).all()  # two for each token in each layer
    assert np.abs(found - expected).sum() <= TIES * expected.sum()


def test_residual_logits_are_of_mean_differences_on_the_training_part(calibrated, seen) -> None:
    x = np.concatenate(seen["training"], axis=1).astype(np.float64)
    residuals = (x[1:] - x[:-1]).mean(axis=1)
    logits = [r @ router.T for r, router in zip(residuals, seen["routers"][1:], strict=True)]
    np.testing.assert_allclose(calibrated.calibration.residual_logits, logits, atol=1e-3)


def test_accuracies_are_measured_on_the_validation_part(calibrated: Calibrated, seen: dict[str, Any]) -> None:
    calibration, routers = calibrated.calibration, seen["routers"]
    x = np.concatenate(seen["validation"], axis=1)
    for layer in range(1, len(routers)):
        used = two_best(x[layer] @ routers[layer].T)
        raw = two_best(x[layer - 1] @ routers[layer].T)
        corrected = two_best(x[layer - 1] @ routers[layer].T + calibration.residual_logits[layer - 1])
        assert calibration.accuracy["raw"][layer] == pytest.approx(accuracy(raw, used), abs=0.005)
        found = accuracy(corrected, used)
        assert calibration.accuracy["residual"][layer] == pytest.approx(found, abs=0.005)
    pairs = [(window[-1, :-1], window[0, 1:]) for window in seen["validation"]]
    last, first = (np.concatenate(part) for part in zip(*pairs, strict=True))
    assert calibration.first_gate is not None
    found = accuracy(two_best(last @ calibration.first_gate.T), two_best(first @ routers[0].T))
    assert calibration.accuracy["first"][0] == pytest.approx(found, abs=0.005)
    for name in ("raw", "residual"):
        assert calibration.accuracy[name][0] == 0
        mean = float(calibration.accuracy[name][1:].mean())
        assert calibrated.summary["accuracy"][name] == pytest.approx(mean, rel=1e-3)  # four digits
        assert mean > 0.6
    assert not calibration.accuracy["first"][1:].any()


def test_threshold_keeps_the_loss_bound_and_drops_experts(calibrated, seen) -> None:
    calibration, summary = calibrated.calibration, calibrated.summary
    assert calibration.sensitivity is not None
    assert calibration.needed is not None
    assert calibration.threshold is not None
    assert (calibration.sensitivity > 0).all()
    assert summary["threshold"] == pytest.approx(calibration.threshold, rel=1e-3)
    assert calibration.threshold > 0
    assert summary["loss"]["gated"] <= summary["loss"]["exact"] * (1 + BOUND)
    # Shares of tokens with a single expert, by the oracle's routing weights without the gate.
    single = []
    for layer, router in enumerate(seen["routers"]):
        weights = []
        for window, x in zip(calibrated.division.validation, seen["validation"], strict=True):
            logits = np.sort(x[layer, window.prefill :] @ router.T, axis=1)
            weights.append(1 / (1 + np.exp(logits[:, -1] - logits[:, -2])))  # of the second expert
        dropped = np.concatenate(weights) ** 2 * calibration.sensitivity[layer] <= calibration.threshold
        single.append(dropped.mean())
    assert (calibration.needed[:, 0] == 0).all()
    np.testing.assert_allclose(calibration.needed[:, 1], single, atol=0.05)  # the gate moves later inputs
    assert summary["single_expert_share"] == pytest.approx(calibration.needed[:, 1].mean(), rel=1e-3)


SUMMARY = {"model": "m", "tokens": 12, "accuracy": {"raw": 0.5, "residual": 0.6, "first": 0.7}}
SUMMARY |= {"loss": {"exact": 2.5, "gated": 2.75}, "threshold": 0.02, "single_expert_share": 0.25}
SUMMARY |= {"sparsity": 0.5, "sparsities": [[0.5, 9.25], [0.9, 20.0]], "notes": ["a note"]}
SHOWN = """\
m: 12 tokens
next layer's experts predicted: 50.0% by its router on this layer's input, 60.0%
with the mean residual added
first layer's experts predicted from the previous token by a trained gate: 70.0%
adaptive gating, threshold 0.02: 25.0% of decode's tokens use one expert; the
loss goes from 2.5000 to 2.7500 nats per token
perplexity by sparsity (--set sparsity=auto takes 0.5): 0.5: 9.25, 0.9: 20
note: a note
"""


def test_lines_of_a_calibration() -> None:
    assert render(*_lines(SUMMARY)) == SHOWN
    assert "threshold" not in render(*_lines(SUMMARY | {"loss": None, "sparsities": []}))


@pytest.mark.parametrize("most", [257, 3000])
def test_of_a_long_text_evenly_spaced_parts_are_sent(most: int) -> None:
    whole = tuple(range(2 * most))
    assert _parts(whole, 2 * most) == [whole]
    parts = _parts(whole, most)
    assert sum(map(len, parts)) == most
    assert len(parts) == PARTS
    for place, part in enumerate(parts):
        first = len(whole) * place // PARTS
        assert part == whole[first : first + len(part)]
        assert abs(len(part) - most / PARTS) <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["--text", "--tokens"]),
        ("--text a --tokens b", ["--tokens", "--text"]),
        ("--text /nowhere/text", ["/nowhere/text"]),
        ("--text README.md --calibrate-tokens 100", ["--calibrate-tokens", "256"]),
        ("--text README.md --max-tokens 3", ["--max-tokens"]),
    ],
)
def test_wrong_usage_is_one_line(arguments: str, words: list[str], complaint: Callable[..., str]) -> None:
    line = complaint("calibrate", *arguments.split())
    for word in words:
        assert word in line


def test_interrupt_leaves_no_file(tiny_model: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([i % 4000 for i in range(60_000)]))
    arguments = ("--tokens", str(ids), "--calibrate-tokens", "60000", "--model", str(tiny_model))
    with Launched("calibrate", *arguments) as process:
        assert wait_until(lambda: "calibrate: " in process.stderr, 60)  # it would take a minute
        process.send(signal.SIGINT)
        code, out, err = process.end()
    assert (code, out) == (1, "")
    assert err.endswith("launch.py: interrupted\n")
    assert not calibration_path(user_folder("CACHE"), open_model(tiny_model)).parent.exists()
