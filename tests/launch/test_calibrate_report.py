"""What `calibrate` prints and draws of a calibration, and what it sends of a long text. No engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import calibrate as module
from launch.command_line.options import parse
from launch.terminal.interrupts import Interrupts
from launch.terminal.plot import Panel
from launch.terminal.tables import render
from pipeline.policies.calibration import Calibration
from protocol.messages import VERSION, Welcome


def calibration(layers: int = 3, **changed: Any) -> Calibration:
    """Of 4 experts, 2 a token."""
    layer = np.arange(layers, dtype=np.float32)
    counts = np.ones((layers, 4), np.int64)
    accuracy = {"raw": 0.5 + layer / 100, "residual": 0.6 + layer / 100, "first": 0.7 + 0 * layer}
    measured: dict[str, Any] = {
        "decode_counts": counts * (5, 5, 0, 0),
        "accuracy": accuracy,
        "kept": np.tile(np.float32([0.0, 0.25, 0.75]), (layers, 2, 1)),
        "gated_accuracy": {name: np.stack([of, of], axis=1) for name, of in accuracy.items()},
        "sensitivity": layer * 1e-3,
        "first_gate": np.ones((4, 5), np.float32),
        "residual_logits": np.zeros((layers - 1, 4), np.float32),
        "hit_rates": np.zeros((0, 0)),
        "threshold": 0.02,
    }
    return Calibration(**measured | changed)


ABOUT: dict[str, Any] = {
    "model": "m",
    "tokens": 12,
    "machine": "a machine",
    "when": "2026-01-02T03",
    "experts_of_a_token": 2,
}
ABOUT |= {"share": 1, "accuracy": {"raw": 0.5, "residual": 0.6, "first": 0.7}}
ABOUT |= {"loss": {"exact": 2.5, "gated": 2.75}, "threshold": 0.02, "single_expert_share": 0.25}
ABOUT |= {"experts_per_token": 1.75, "notes": ["a note"]}
SNAPSHOT = """\
           router    residual        gate  sensitivity    experts
layer  predicts %  predicts %  predicts %  of the loss  per token
    0           -           -        70.0      0.0e+00       1.75
    1        51.0        61.0           -      1.0e-03       1.75
    2        52.0        62.0           -      2.0e-03       1.75

m: 12 tokens, the whole text
next layer's experts predicted: 50.0% by its router on this layer's input, 60.0%
with the mean residual added
first layer's experts predicted from the previous token by a trained gate: 70.0%
adaptive gating, threshold 0.02: 25.0% of decode's tokens use one expert, 1.75
on average; the loss goes from 2.5000 to 2.7500 nats per token
note: a note
"""


def shown(found: Calibration | None = None, **changed: Any) -> str:
    return render(*module._parts(ABOUT | changed, found or calibration()))


def test_table_of_a_calibration() -> None:
    assert shown(calibration()) == SNAPSHOT
    unknown = calibration(sensitivity=None, first_gate=None)
    row = next(line for line in shown(unknown, loss=None).splitlines() if line.split()[:1] == ["0"])
    assert row.split() == ["0", "-", "-", "-", "-", "-"]
    assert "threshold" not in shown(loss=None)
    for layers, tabled in ((64, True), (65, False)):
        assert ("sensitivity" in shown(calibration(layers))) is tabled


def test_part_of_a_text_is_said() -> None:
    assert "12.5% of the text, in windows evenly spaced over it" in " ".join(shown(share=0.125).split())


def test_page_has_a_panel_for_each_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[list[Panel]]] = []
    monkeypatch.setattr(module, "draw", lambda path, rows, *_, **__: drawn.append(rows))
    module._draw(calibration(), ABOUT, tmp_path / "a.png")
    module._draw(calibration(sensitivity=None), ABOUT, tmp_path / "a.png")
    panels = {panel.title: panel.series[0].values for row in drawn[0] for panel in row}
    assert panels["router predicts %"] == {1: [pytest.approx(51)], 2: [pytest.approx(52)]}
    assert panels["experts per token"] == {i: [1.75] for i in range(3)}
    assert len(panels) == 4
    assert [len(row) for row in drawn[1]] == [2]


class StandInEngine:
    def __init__(self) -> None:
        self.welcome = Welcome(VERSION, "e", "m", "f", "cpu", "lru", True, 9, 16, True, True)
        self.sent: list[dict[str, Any]] = []

    async def calibrate(self, on_progress: object, **fields: Any) -> None:
        self.sent.append(fields)
        raise asyncio.CancelledError


@pytest.mark.parametrize("most", [257, 3000])
async def test_long_text_is_sent_as_excerpts_evenly_spaced(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are sent as excerpts of `most` in all; a text is, of 16 characters for each token."""
    engine, given = StandInEngine(), []

    @asynccontextmanager
    async def client(options: Any, _: object) -> Any:
        given.append(options)
        yield engine

    monkeypatch.setattr(module, "reconnecting_client", client)

    count, parts = 2 * most, module.EXCERPTS
    (tmp_path / "ids").write_text(str([*range(count)]))
    (tmp_path / "text").write_text("".join(chr(0x4E00 + i % 20000) for i in range(16 * count)))
    for words, scale in ((f"--tokens {tmp_path}/ids", 1), (f"--text {tmp_path}/text", 16)):
        with pytest.raises(asyncio.CancelledError):
            await module.calibrate(
                parse(["calibrate", *words.split(), "--calibrate-tokens", str(most)]), Interrupts()
            )
        sent = engine.sent[-1]
        assert sent["share"] == 0.5
        assert sent["tokens"] == most
        read = sent["token_ids"] if scale == 1 else [ord(letter) - 0x4E00 for letter in sent["text"]]
        assert len(read) == scale * most
        bounds = [0, *sent["starts"], len(read)]
        assert len(bounds) == parts + 1
        for part, (begin, end) in enumerate(pairwise(bounds)):
            first = scale * count * part // parts
            assert list(read[begin:end]) == [
                i % 20000 if scale > 1 else i for i in range(first, first + end - begin)
            ]
        assert max(np.diff(bounds)) - min(np.diff(bounds)) <= 1
    assert [(o.written["policy"], o.written["expert_cache"]) for o in given] == [("fiddler", 0.0)] * 2
    (tmp_path / "ids").write_text(str([*range(most)]))
    with pytest.raises(asyncio.CancelledError):
        await module.calibrate(
            parse(["calibrate", "--tokens", f"{tmp_path}/ids", "--calibrate-tokens", str(most), "--connect"]),
            Interrupts(),
        )
    assert engine.sent[-1]["starts"] == ()
    assert engine.sent[-1]["share"] == 1.0
    assert engine.sent[-1]["token_ids"] == tuple(range(most))
    assert "policy" not in given[-1].written
