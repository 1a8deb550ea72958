"""What the figures of `bench --plot` and `calibrate --report` show, by the axes of each figure."""

from __future__ import annotations

import asyncio
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
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
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
