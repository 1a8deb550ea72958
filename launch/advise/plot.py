"""`advise --plot`: the fastest presets over the size of the expert cache, and the fastest of every format."""

from __future__ import annotations

from pathlib import Path

from launch.advise.report import Report
from launch.terminal.format import model_name
from launch.terminal.plot import BLUE, FAINT, Panel, Series, draw


def draw_advice(report: Report, path: Path) -> None:
    """Write the picture, whole or not at all. Raises OutputFailed."""
    advice = report.advice
    setting = advice.best.setting
    curves = Panel(
        f"decode, tok/s, {setting.format}",
        [
            Series(label, {share: [speed] for share, speed in points})
            for label, points in advice.curves.items()
        ],
        "expert cache, share of all tiles",
        mark=(setting.share, "what fits"),
    )
    fastest = {
        f"{each.setting.format} {each.setting.policy.name}": each
        for fitting in advice.formats
        for each in advice.of(fitting.sizes.format)[:3]
    }
    bars = Panel(
        "the three fastest of each format, tok/s",
        [
            Series(
                label, {name: [each.tok_s * (each.exact is exact)] for name, each in fastest.items()}, color
            )
            for label, exact, color in (("exact", True, BLUE), ("approximate", False, FAINT))
        ],
    )
    model = model_name(report.source.name, article="")
    heading = f"{model}, {report.hardware.words}\n{report.text.words}; estimated"
    draw(path, [[curves, bars]], heading)
