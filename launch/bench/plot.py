"""`bench --plot`: a row for each policy; panels for speeds, hits, bytes copied and approximation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launch.bench.report import Report
from launch.bench.result import PolicyResult
from launch.command_line.checks import check_extra
from launch.errors import OutputFailed, WrongUsage
from launch.phase_profile import PhaseProfile
from launch.terminal.format import alike, count, percent
from launch.terminal.log import notice
from shm.atomic_file import SHARED, atomic_file, check_creatable

log = logging.getLogger("tandem")

KINDS = (".png", ".svg", ".pdf")
INK, FAINT = "#333333", "#999999"
SPEED, HITS = "#3b6ea5", "#5b9a68"
# Why bytes were moved, in the order of _moved_by_cause.
BYTES = {
    "a step waited for it": "#c0504d",
    "prefetched too late": "#e39b6d",
    "prefetched and used": "#5b9a68",
    "prefetched, not used": "#b9b9b9",
    "replaced in the background": "#7d9cc0",
}
# Without `predicted`: it counts experts that a predictor chose, and their result need not differ.
APPROXIMATE = {"skipped": "#8c6bb1", "substituted": "#b59ad0", "stale": "#d9a441", "left": "#7a9e7e"}
NAMES = {  # in a legend
    "skipped": "expert skipped",
    "substituted": "another expert instead",
    "stale": "from the layer before's input",
}
ROW = 0.42  # inches


def check_picture(path: Path) -> None:
    """Raises WrongUsage unless a picture can be made there."""
    check_extra("--plot", "plots", "matplotlib")
    if path.suffix.lower() not in KINDS:
        kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise WrongUsage(f"--plot {path}: a picture's name ends in {kinds}")
    try:
        check_creatable(path)
    except OSError as e:
        raise WrongUsage(f"--plot {path}: no file can be made there: {e.strerror}") from None


def draw(report: Report, path: Path) -> None:
    """Write the picture, whole or not at all. Raises OutputFailed."""
    import matplotlib  # here, because it takes a second

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # on its first use it logs a search for fonts
    matplotlib.use("Agg")
    from matplotlib import pyplot

    results, profiles = report.results, report.profiles
    rows: list[list[Callable[[Any], None]]] = [
        [
            lambda axes: _figures(axes, results, "prefill_tok_s", "prefill, tok/s"),
            lambda axes: _figures(axes, results, "first_token_s", "time to the first token, ms", 1e3),
            lambda axes: _figures(axes, results, "decode_tok_s", "decode, tok/s"),
        ]
    ]
    if profiles:
        rows.append([lambda axes: _hits(axes, profiles), lambda axes: _bytes(axes, results, profiles)])
    if profiles and not all(result.exact for result in results):
        rows[1].append(lambda axes: _fidelity(axes, results, profiles))
    if report.energy:
        rows.append(
            [
                lambda axes: _figures(axes, results, "prefill_j_token", "prefill, J/token, less idle power"),
                lambda axes: _figures(axes, results, "decode_j_token", "decode, J/token, less idle power"),
            ]
        )
    size = (13.0, 1.2 + len(rows) * (1.5 + ROW * len(results)))
    with pyplot.style.context("default"):
        figure, grid = pyplot.subplots(
            len(rows), 3, sharey=True, figsize=size, squeeze=False, layout="constrained"
        )
        for line, panels in zip(grid, rows, strict=True):
            for axes, panel in zip(line, panels, strict=False):
                panel(axes)
                tidy(axes)
            for axes in line[len(panels) :]:
                axes.set_axis_off()
        first = grid[0][0]
        first.set_yticks(range(len(results)), [_label(result) for result in results])
        first.set_ylim(len(results) - 0.5, -0.5)
        figure.suptitle(_title(report), fontsize=10, color=INK, x=0.01, ha="left")
        layout: Any = figure.get_layout_engine()
        layout.set(rect=(0, 0.03, 1, 0.97), w_pad=0.12, h_pad=0.08)
        figure.text(0.01, 0.008, _footnote(report), fontsize=7.5, color=FAINT, va="bottom")
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure of pyplot and close it. Raises OutputFailed."""
    from matplotlib import pyplot

    try:
        with atomic_file(path, SHARED) as file:
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)
    except OSError as e:
        raise OutputFailed(f"--plot {path}: {e.strerror}") from e
    finally:
        pyplot.close(figure)
    notice(f"wrote {path}")


def _figures(axes: Any, results: Sequence[PolicyResult], name: str, title: str, scale: float = 1.0) -> None:
    """A field of Run: the median as a bar, the range as a line."""
    every = [[scale * value for value in result.figures(name)] for result in results]
    middle = [median(values) for values in every]
    spread = [
        [m - min(values) for m, values in zip(middle, every, strict=True)],
        [max(values) - m for m, values in zip(middle, every, strict=True)],
    ]
    axes.barh(range(len(results)), middle, xerr=spread, color=SPEED, height=0.6, ecolor=INK, capsize=2)
    for row, (words, values) in enumerate(zip(alike(middle), every, strict=True)):
        _write(axes, max(values), row, words)
    axes.set_title(title)
    _from_zero(axes, max(map(max, every)))


def _hits(axes: Any, profiles: Sequence[PhaseProfile]) -> None:
    rates = [100 * (profile.hit_rate or 0.0) for profile in profiles]
    axes.barh(range(len(rates)), rates, color=HITS, height=0.6)
    for row, profile in enumerate(profiles):
        _write(axes, rates[row], row, percent(profile.hit_rate))
    axes.set_title("needed experts that were on the device, %")
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))


def _bytes(axes: Any, results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> None:
    sums = _stack(axes, BYTES, [_moved_by_cause(*both) for both in zip(results, profiles, strict=True)])
    for row, words in enumerate(alike(sums)):
        _write(axes, sums[row], row, words)
    axes.set_title("copied to the device in decode, MB/token")
    _from_zero(axes, max(sums))
    _legend(axes)


def _moved_by_cause(result: PolicyResult, profile: PhaseProfile) -> dict[str, float]:
    """MB a token by the kinds of BYTES; they add up to all that was moved."""
    moved, scale = profile.moved, 1e6 * max(profile.rows, 1)
    late = min(moved["late"], moved["demanded"])
    used = min(moved["useful"], moved["predicted"])
    placed = result.placed_bytes * max(profile.rows, 1)
    sizes = (moved["demanded"] - late, late, used, moved["predicted"] - used, placed)
    return {kind: size / scale for kind, size in zip(BYTES, sizes, strict=True)}


def _fidelity(axes: Any, results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> None:
    shares = [{kind: 100 * profile.fidelity[kind] for kind in APPROXIMATE} for profile in profiles]
    sums = _stack(axes, APPROXIMATE, shares)
    for row, (result, its) in enumerate(zip(results, shares, strict=True)):
        words = " + ".join(f"{share:.1f}" for share in its.values() if share)
        shown = "exact" if result.exact else words or "0"
        if result.perplexity is not None:
            shown += f"   (perplexity {result.perplexity.percent:+.2f}%)"
        _write(axes, sums[row], row, shown, FAINT if result.exact else INK)
    axes.set_title("computed otherwise than routed, % of the weight")
    axes.set_xlim(0, max(1.0, max(sums) * 2.4))
    _legend(axes)


def _from_zero(axes: Any, largest: float) -> None:
    """The axis begins at 0, and leaves room for the figures behind the bars."""
    axes.set_xlim(0, 1.25 * largest or 1.0)


def _stack(axes: Any, colors: Mapping[str, str], rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Draw a bar of each row's values by kind, one after the other; returns their sums."""
    left = [0.0] * len(rows)
    for kind, color in colors.items():
        values = [row[kind] for row in rows]
        if any(values):
            label = NAMES.get(kind, kind)
            axes.barh(range(len(rows)), values, left=left, color=color, height=0.6, label=label)
        left = [before + value for before, value in zip(left, values, strict=True)]
    return left


def _write(axes: Any, x: float, row: int, text: str, color: str = INK) -> None:
    axes.annotate(
        text, (x, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=color
    )


def tidy(axes: Any, grid: str = "x") -> None:
    """The style of all panels; `grid`: the axis with figures."""
    axes.title.set_fontsize(9)
    axes.title.set_color(INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1)}
        axes.legend(ncols=2, fontsize=7, frameon=False, handlelength=1.2, **place)


def _label(result: PolicyResult) -> str:
    options = "".join(f"\n{name}={value}" for name, value in result.request.options.items())
    return result.request.name + options


def _title(report: Report) -> str:
    c = report.config
    cache = "" if c.get("expert_cache") is None else f", expert cache {percent(c['expert_cache'])}"
    lines = [
        f"{report.model_name} on {c['device']}: experts {c['format']}{cache}",
        f"batch {c['batch']}, {count(c['prompt_len'], 'prompt token')}, {c['gen_len']} generated;"
        f" bars: median of {count(c['rounds'], 'round')}, lines: range"
        + (f"; emulated: {report.emulation}" if report.emulation else ""),
    ]
    return "\n".join(lines)


def _footnote(report: Report) -> str:
    return f"{report.config.get('machine', '')}, {report.config.get('when', '')[:10]}".strip(", ")
