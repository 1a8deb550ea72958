"""What the figures of `bench --plot` and `calibrate --report` show, by the axes of each figure."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from test_bench_report import whole_report

from launch.bench import plot
from launch.bench.run import Run
from launch.calibrate import command, figures
from launch.calibrate.table import render
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from pipeline.policies.calibration import Calibration
from protocol.messages import VERSION, Welcome

Drawn = dict[str, Figure]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Each figure by its file's name; the files are empty."""
    found: Drawn = {}

    def save(figure: Figure, file: Any, **settings: Any) -> None:
        found[f"{len(found)}.{settings['format']}"] = figure

    monkeypatch.setattr(Figure, "savefig", save)
    return found


def bars(axes: Any) -> list[tuple[str, list[tuple[float, float]]]]:
    """Of each kind: its label, and each row's begin and length."""
    return [
        (container.get_label().strip("_0123456789"), [(bar.get_x(), bar.get_width()) for bar in container])
        for container in axes.containers
        if isinstance(container, BarContainer)
    ]


def ranges(axes: Any) -> list[tuple[float, float]]:
    (errors,) = (container for container in axes.containers if isinstance(container, ErrorbarContainer))
    return [(segment[0][0], segment[1][0]) for segment in errors[2][0].get_segments()]


def words(axes: Any) -> list[tuple[float, float, str]]:
    """Figures at the ends of bars: where, and what."""
    return [(*text.xy, text.get_text()) for text in axes.texts]


def test_plot_of_policies_has_their_figures(tmp_path: Path, drawn: Drawn) -> None:
    report = whole_report()
    runs = [Run(900.0 + n, 0.1 + n / 10, 30.0 + n, 0, 0.0, 0.5) for n in range(3)]
    plot.draw(report, tmp_path / "a.PNG")
    plot.draw(replace(report, results=[replace(report.results[0], runs=runs)]), tmp_path / "b.pdf")
    assert [*drawn] == ["0.png", "1.pdf"]
    whole, few = drawn.values()
    speeds = [axes for axes in few.axes if axes.axison]
    assert [bars(axes) for axes in speeds] == [
        [("container", [(0, middle)])] for middle in (901, pytest.approx(200), 31)
    ]
    assert [ranges(axes) for axes in speeds] == [[(900, 902)], [pytest.approx((100, 300))], [(30, 32)]]
    assert [words(axes) for axes in speeds] == [
        [(902, 0, "901")],
        [(pytest.approx(300), 0, "200")],
        [(32, 0, "31.0")],
    ]
    assert [axes.get_xlim() for axes in speeds][::2] == [(0, 1.25 * 902), (0, 40)]

    prefill, first, decode, hits, moved, approximated = whole.axes
    titles = [axes.get_title().split(",")[0] for axes in whole.axes]
    assert [titles[i] for i in (0, 2, 4)] == ["prefill", "decode", "copied to the device in decode"]
    assert "first token" in titles[1]
    assert [axes.get_title().split(",")[-1] for axes in (first, decode, moved)] == [
        " ms",
        " tok/s",
        " MB/token",
    ]
    names = [label.get_text() for label in prefill.get_yticklabels()]
    assert names == ["mixtral-offloading", "daop"]
    assert prefill.get_ylim() == (1.5, -0.5)  # the first policy above
    assert bars(hits) == [("container", [(0, 50)] * 2)]
    assert words(hits) == [(50, 0, "50%"), (50, 1, "50%")]
    sizes = (4.5, 0.5, 1.2, 0.8, 3.0)
    begins = (0, 4.5, 5, 6.2, 7)
    assert bars(moved) == [
        (kind, [pytest.approx((begin, size))] * 2)
        for kind, begin, size in zip(plot.BYTES, begins, sizes, strict=True)
    ]
    assert words(moved) == [(pytest.approx(10), row, "10.0") for row in range(2)]
    assert bars(approximated) == [
        ("another expert instead", [(0, 0), pytest.approx((0, 12.3))]),
        ("from the layer before's input", [(0, 0), pytest.approx((12.3, 25))]),
    ]
    assert [text for _, _, text in words(approximated)] == ["exact", "12.3 + 25.0   (perplexity +2.50%)"]
    assert approximated.get_xlim() == pytest.approx((0, 2.4 * 37.3))
    title = whole.get_suptitle()
    assert "a-model on cuda: experts bf16, expert cache 25%\n" in title
    assert "batch 1, 128 prompt tokens, 11 generated" in title
    assert "emulated" not in title


def test_emulation_machine_and_options_are_in_the_plot(tmp_path: Path, drawn: Drawn) -> None:
    report = whole_report()
    about = report.config | {"machine": "a machine", "when": "2026-01-02T03:04:05", "expert_cache": None}
    request = replace(report.results[0].request, options={"scope": "global"})
    results = [replace(report.results[0], request=request), report.results[1]]
    plot.draw(replace(report, config=about, emulation="slow link", results=results), tmp_path / "a.svg")
    (figure,) = drawn.values()
    assert figure.get_suptitle().endswith("emulated: slow link")
    assert "expert cache" not in figure.get_suptitle()
    assert [text.get_text() for text in figure.texts] == [figure.get_suptitle(), "a machine, 2026-01-02"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "mixtral-offloading\nscope=global"


@pytest.mark.parametrize("name", ["a.jpg", "a", "no/a.png"])
def test_plot_that_cannot_be_made_is_refused_before_an_engine_starts(tmp_path: Path, name: str) -> None:
    with pytest.raises(WrongUsage, match="--plot"):
        plot.check_picture(tmp_path / name)
    plot.check_picture(tmp_path / "a.PDF")


def test_figures_without_matplotlib_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    message = r"--plot needs the Python package matplotlib: run .* install '(matplotlib>=.*|\.\[plots\])'$"
    with pytest.raises(WrongUsage, match=message):
        plot.check_picture(tmp_path / "a.png")
    with pytest.raises(WrongUsage, match="--report needs the Python package matplotlib"):
        figures.check_folder(tmp_path / "report")
    assert not list(tmp_path.iterdir())


def calibration(layers: int = 3, **changed: Any) -> Calibration:
    """Of 4 experts, 2 a token."""
    layer = np.arange(layers, dtype=np.float32)
    counts = np.ones((layers, 4), np.int64)
    accuracy = {"raw": 0.5 + layer / 100, "residual": 0.6 + layer / 100, "first": 0.7 + 0 * layer}
    measured: dict[str, Any] = {
        "prefill_counts": counts * (1, 2, 3, 4),
        "decode_counts": counts * (5, 5, 0, 0),
        "accuracy": accuracy,
        "similarity": 0.9 - layer / 10,
        "kept": np.tile(np.float32([0.0, 0.25, 0.75]), (layers, 2, 1)),
        "gated_accuracy": {name: np.stack([of, of], axis=1) for name, of in accuracy.items()},
        "needed": np.tile(np.float32([0.0, 0.25, 0.75]), (layers, 1)),
        "sensitivity": layer * 1e-3,
        "first_gate": np.ones((4, 5), np.float32),
        "residuals": np.zeros((layers - 1, 5), np.float32),
        "residual_logits": np.zeros((layers - 1, 4), np.float32),
        "threshold": 0.02,
    }
    return Calibration(**measured | changed)


PREFETCH = {
    "rows": [1, 16],
    "top": [1, 2],
    "accuracy": {"raw": [[0.1, 0.2], [0.5, 0.6]], "residual": [[0.3, 0.4], [1.0, 0.8]]},
    "cosines": {"raw": [0.125, 0.375], "residual": [0.25, 0.75]},
}
ABOUT = {"model": "m", "tokens": 12, "machine": "a machine", "when": "2026-01-02T03", "experts_of_a_token": 2}


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Of each line, by the beginning of its label: x and y."""
    return {
        line.get_label().split(":")[0].split(",")[0]: (
            np.asarray(line.get_xdata(), float).tolist(),
            np.asarray(line.get_ydata(), float).tolist(),
        )
        for line in axes.lines
    }


def test_figures_of_a_calibration(tmp_path: Path, drawn: Drawn) -> None:
    written = figures.draw(calibration(), ABOUT | {"prefetch": PREFETCH}, tmp_path)
    names = ["activations", "accuracy", "similarity", "prefetch", "sensitivity", "report"]
    assert [path.name for path in written] == [f"{name}.png" for name in names]
    activations, accuracy, similarity, prefetch, sensitivity, page = drawn.values()
    prefill, decode, bar = activations.axes
    assert (prefill.get_title("left"), decode.get_title("left")) == ("prefill", "decode")
    assert prefill.images[0].get_array().tolist() == [pytest.approx([10, 20, 30, 40])] * 3
    assert decode.images[0].get_array().tolist() == [[50, 50, 0, 0]] * 3
    assert prefill.images[0].get_clim() == decode.images[0].get_clim() == (0, 50)
    assert [25, 25] in [y for _, y in lines(bar).values()]  # uniform use

    (axes,) = accuracy.axes
    found = lines(axes)
    assert found["the layer's router"] == ([1, 2], pytest.approx([51, 52]))
    assert found["the same"] == ([1, 2], pytest.approx([61, 62]))
    assert found["layer 0"] == ([0], pytest.approx([70]))
    assert found["by chance"][1] == [50, 50]
    (axes,) = similarity.axes
    assert lines(axes)["of a layer"] == ([0, 1, 2], pytest.approx([0.9, 0.8, 0.7]))
    assert lines(axes)["mean over layers"][1] == pytest.approx([0.8, 0.8])
    assert axes.get_ylim() == (0, 1.02)
    above, below = prefetch.axes
    shares = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in above.lines}
    assert shares == {
        "top 1, router": pytest.approx([10, 50]),
        "top 2, router": pytest.approx([20, 60]),
        "top 1, with the residual": pytest.approx([30, 100]),
        "top 2, with the residual": pytest.approx([40, 80]),
    }
    assert (above.get_xscale(), above.get_xticks().tolist()) == ("log", [1, 16])
    assert lines(below) == {"router": ([1, 2], [0.125, 0.375]), "with the residual": ([1, 2], [0.25, 0.75])}
    assert [line.get_label() for line in below.lines][1].endswith(": 0.500 on average")
    above, below = sensitivity.axes
    ((x, y),) = lines(above).values()
    assert x == [0, 1, 2]
    assert y[1:] == pytest.approx([1e-3, 2e-3])
    assert np.isnan(y[0])  # a log scale has no 0
    assert above.get_yscale() == "log"
    stacked = [
        (container.get_label(), [(bar.get_y(), bar.get_height()) for bar in container])
        for container in below.containers
    ]
    assert stacked == [("1 expert", [(0, 25)] * 3), ("2 experts", [(25, 75)] * 3)]
    assert "0.02" in below.get_title("left")
    for figure in (activations, accuracy, similarity, prefetch, sensitivity):
        assert figure.texts[-1].get_text() == "m, 12 tokens of text; a machine, 2026-01-02"
    assert len(page.get_axes() or [axes for part in page.subfigs for axes in part.get_axes()]) == 9


def test_figures_leave_out_what_was_not_measured(tmp_path: Path, drawn: Drawn) -> None:
    unmeasured = [tmp_path / f"{name}.png" for name in ("sensitivity", "prefetch")]
    for path in unmeasured:
        path.touch()  # of an earlier calibration
    unknown: dict[str, Any] = {"sensitivity": None, "needed": None, "first_gate": None, "threshold": None}
    about = {**ABOUT, "experts_of_a_token": None}
    written = figures.draw(calibration(40, **unknown), about, tmp_path)
    assert [path.stem for path in written] == ["activations", "accuracy", "similarity", "report"]
    assert not any(path.exists() for path in unmeasured)
    found = lines(drawn["1.png"].axes[0])
    assert [*found] == ["the layer's router", "the same"]
    assert drawn["2.png"].axes[0].get_xticks().tolist() == [*range(0, 40, 4)]
    assert drawn["2.png"].axes[0].get_ylim()[0] == pytest.approx(0.9 - 3.9)  # a negative cosine
    known = calibration(1)
    figures.draw(known, about, tmp_path)
    assert len(drawn["7.png"].axes) == 1  # the sensitivity without the gate's experts


def test_table_of_a_calibration() -> None:
    found = {
        **{"model": "m", "tokens": 12, "share": 1, "accuracy": {"raw": 0.5, "residual": 0.6, "first": 0.7}},
        **{"similarity": 0.8, "loss": None, "threshold": None, "notes": ["a note"], "prefetch": PREFETCH},
    }
    text = render(Path("/c/file"), found, calibration(), [Path("/r/a.png")], " --connect e")
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d+ +\S+ +\S+ +\S+ +\S+ +0\.", line)]
    assert rows == [
        ["0", "*70.0%", "-", "-", "-", "0.900", "0.0e+00", "1.75"],
        ["1", "51.0%", "61.0%", "0.125", "0.250", "0.800", "1.0e-03", "1.75"],
        ["2", "52.0%", "62.0%", "0.375", "0.750", "0.700", "2.0e-03", "1.75"],
    ]
    batches = [line.split() for line in text.splitlines() if re.match(r" *\d+ +[\d.]+%, ", line)]
    assert batches == [
        ["1", "10.0%,", "30.0%", "20.0%,", "40.0%"],
        ["16", "50.0%,", "100.0%", "60.0%,", "80.0%"],
    ]
    assert "cosine of a layer's input to the next one's: 0.250, 0.500 with" in " ".join(text.split())
    assert "saved: /c/file\nfigure: /r/a.png\nnext: python launch.py bench" in text
    assert "--policy all-host,fiddler --connect e " in text
    assert "note: a note" in text
    loss = {"loss": {"exact": 2.5, "gated": 2.75}, "threshold": 0.02, "single_expert_share": 0.25}
    gated = render(Path("/c"), found | loss | {"experts_per_token": 1.75}, None, [], "")
    assert re.search(r"0\.02\b.*\b25\.0%.*\b1\.75\b.*\b2\.5000 to 2\.7500\b", " ".join(gated.split()))
    assert "--policy all-host,fiddler,adapmoe " in gated
    assert "threshold" not in text
    older = {name: value for name, value in found.items() if name != "prefetch"}
    unknown = render(Path("/c"), older, calibration(sensitivity=None, first_gate=None), [], "").splitlines()
    assert [line.split() for line in unknown if line.strip()[:2] == "0 "] == [
        ["0", "-", "-", "-", "-", "0.900", "-", "-"]
    ]
    for layers, shown in ((64, True), (65, False)):
        assert ("sensitivity" in render(Path("/c"), older, calibration(layers), [], "")) is shown
    for share, hits, expected, absent in (
        (
            0.125,
            {"share": 0.25, "heldout": 0.6, "own": None},
            "3 windows, evenly spaced over the text",
            "warning",
        ),
        (
            None,
            {"share": 0.25, "heldout": 0.6, "prompts": 0.62, "own": 0.2, "differs": True, "tokens": 50},
            "(20% of those used there, 62% of those used by the text's own prompts)",
            "whole text",
        ),
        (
            None,
            {"share": 0.25, "heldout": 0.6, "prompts": 0.62, "own": 0.0, "differs": True, "tokens": 50},
            "(0% of those used there, ",
            "whole text",
        ),
        (
            1,
            {"share": 0.25, "heldout": 0.6, "prompts": 0.62, "own": 0.59, "differs": False, "tokens": 50},
            "59% of those used by the 50 tokens that the engine has computed",
            "warning",
        ),
    ):
        text = " ".join(
            render(Path("/c"), found | {"share": share, "windows": 3, "hits": hits}, None, [], "").split()
        )
        assert expected in text
        assert absent not in text
        assert "25% of the experts" in text
        assert "60% of those that its held-out part needs would be resident" in text


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

    monkeypatch.setattr(command, "reconnecting_client", client)

    count, parts = 2 * most, command.EXCERPTS
    (tmp_path / "ids").write_text(str([*range(count)]))
    (tmp_path / "text").write_text("".join(chr(0x4E00 + i % 20000) for i in range(16 * count)))
    for words, scale in ((f"--tokens {tmp_path}/ids", 1), (f"--text {tmp_path}/text", 16)):
        with pytest.raises(asyncio.CancelledError):
            await command.calibrate(
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
        await command.calibrate(
            parse(["calibrate", "--tokens", f"{tmp_path}/ids", "--calibrate-tokens", str(most), "--connect"]),
            Interrupts(),
        )
    assert engine.sent[-1]["starts"] == ()
    assert engine.sent[-1]["share"] == 1.0
    assert engine.sent[-1]["token_ids"] == tuple(range(most))
    assert "policy" not in given[-1].written
