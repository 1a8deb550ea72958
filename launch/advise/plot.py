"""`advise --plot`: the fastest presets over the size of the expert cache, and the fastest of every format."""

from __future__ import annotations

from pathlib import Path

from launch.advise.report import Report
from launch.bench.plot import FAINT, INK, SPEED, save, tidy
from launch.bench.sweep_plot import MARKS
from launch.terminal.format import alike, model_name


def draw_advice(report: Report, path: Path) -> None:
    """Write the picture, whole or not at all. Raises OutputFailed."""
    import matplotlib  # here, because it takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    advice = report.advice
    best = advice.best
    with pyplot.style.context("default"):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.2), layout="constrained")
        for mark, (label, points) in zip(MARKS, advice.curves.items(), strict=False):
            shares, speeds = zip(*points, strict=True)
            left.plot(shares, speeds, marker=mark, ms=4, lw=1.4, label=label)
        left.axvline(best.setting.share, color=FAINT, lw=1, ls=":")
        left.text(best.setting.share, 0, " what fits", color=FAINT, fontsize=8, rotation=90, va="bottom")
        left.set_ylim(bottom=0)
        left.set_xlabel("expert cache, share of all tiles", fontsize=8, color=FAINT)
        left.set_title(f"decode, tok/s, {best.setting.format}")
        left.legend(fontsize=8, frameon=False)
        tidy(left, grid="y")
        rows = [each for fitting in advice.formats for each in advice.of(fitting.sizes.format)[:3]][::-1]
        names = [f"{each.setting.format} {each.setting.policy.name}" for each in rows]
        tok_s = [each.tok_s for each in rows]
        colours = [SPEED if each.exact else FAINT for each in rows]
        right.barh(range(len(rows)), tok_s, color=colours, height=0.6)
        for row, words in enumerate(alike(tok_s)):
            right.text(tok_s[row], row, f" {words}", va="center", fontsize=8, color=INK)
        right.set_yticks(range(len(rows)), names, fontsize=8)
        right.set_title("the three fastest of each format, tok/s (grey: approximate)")
        tidy(right, grid="x")
        heading = (
            f"{model_name(report.source.name, article='')}, {report.hardware.words}\n{report.text.words}"
        )
        figure.suptitle(f"{heading}; estimated", fontsize=9, color=INK, x=0.01, ha="left")
        save(figure, path)
