"""The papers' figures, for one model on one machine, as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.command_line.checks import check_extra
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import percent
from pipeline.calibration.file import mean_accuracy
from pipeline.policies.calibration import Calibration
from shm.atomic_file import SHARED, atomic_file, check_creatable

DPI = 150
INK, FAINT = "#333333", "#999999"
COLORS = {"raw": "#3b6ea5", "residual": "#c0504d", "first": "#5b9a68"}
NAMES = {
    "raw": "the layer's router, applied to the input of the layer before",
    "residual": "the same, with the mean residual added (DALI)",
    "first": "layer 0: a trained gate, applied to the previous token's last layer (AdapMoE)",
}
Drawing = Callable[[Any], Any]  # from pyplot to a figure
MOST_TICKS = 16  # of an axis
PAGE = "report"  # all figures together


def check_folder(folder: Path) -> None:
    """Create the folder. Raises WrongUsage where no file can be created in it, or without matplotlib."""
    check_extra("--report", "plots", "matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_creatable(folder / "probe")
    except OSError as e:
        raise WrongUsage(f"--report {folder}: no file can be created there: {e.strerror}") from None


def draw(calibration: Calibration, about: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figures, each whole or not at all; one without data is removed. Raises OutputFailed."""
    import matplotlib  # here, because it takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures: dict[str, Drawing | None] = {
        "activations": lambda plot: _activations(plot, calibration),
        "accuracy": lambda plot: _accuracy(plot, calibration, about),
        "similarity": lambda plot: _similarity(plot, calibration),
        "sensitivity": None
        if calibration.sensitivity is None
        else lambda plot: _sensitivity(plot, calibration),
    }
    drawn = [make for make in figures.values() if make is not None]
    figures[PAGE] = lambda plot: _page(plot, *drawn)
    written = []
    for name, make in figures.items():
        path = folder / f"{name}.png"
        try:
            if make is None:
                path.unlink(missing_ok=True)
                continue
            with pyplot.style.context("default"):
                figure = make(pyplot)
                try:
                    figure.text(0.01, 0.005, _footnote(about), fontsize=7, color=FAINT, va="bottom")
                    with atomic_file(path, SHARED) as file:
                        figure.savefig(file, format="png", dpi=DPI)
                finally:
                    pyplot.close(figure)
        except OSError as e:
            raise OutputFailed(f"--report {path}: {e.strerror}") from e
        written.append(path)
    return written


class _Place:
    """Stands for pyplot, and makes a figure in a part of a page."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def subplots(self, rows: int, columns: int, *, figsize: object, layout: str, **kept: Any) -> Any:
        """The sizes are the page's."""
        return self._part, self._part.subplots(rows, columns, **kept)


def _page(plot: Any, activations: Drawing, accuracy: Drawing, similarity: Drawing, *more: Drawing) -> Any:
    """The first figure above the others."""
    figure = plot.figure(figsize=(min(8.0 * (1 + len(more)), 20.0), 14.0), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.5), hspace=0.03)
    columns = below.subfigures(1, 1 + len(more), wspace=0.03, squeeze=False)[0]
    left = columns[0].subfigures(2, 1, hspace=0.03)
    for make, part in zip(
        (activations, accuracy, similarity, *more), (above, *left, *columns[1:]), strict=True
    ):
        make(_Place(part))
    return figure


def _activations(plot: Any, calibration: Calibration) -> Any:
    """DAOP's figure 3: each expert's share of the activations, in prefill and in decode."""
    layers, experts = calibration.prefill_counts.shape
    both = [_shares(calibration.prefill_counts), _shares(calibration.decode_counts)]
    brightest = max(100 / experts, *(float(np.quantile(shares, 0.995)) for shares in both))
    # Cells wide enough to be distinguished, figures no larger than a screen.
    width = min(max(0.32 * experts, 3.2), 7.0)
    height = min(max(0.26 * layers, 2.2), 9.0)
    figure, all_axes = _figure(plot, 1, 2, (2 * width + 1.7, height + 1.5), sharey=True)
    for axes, shares, phase in zip(all_axes, both, ("prefill", "decode"), strict=True):
        image = axes.imshow(
            shares, aspect="auto", cmap="viridis", vmin=0, vmax=brightest, interpolation="nearest"
        )
        _title(axes, phase)
        axes.set_xlabel("expert", fontsize=9, color=INK)
        axes.set_xticks(_ticks(experts))
        axes.tick_params(labelsize=8, colors=INK, length=2)
    all_axes[0].set_ylabel("layer", fontsize=9, color=INK)
    all_axes[0].set_yticks(_ticks(layers))
    beyond = any(shares.max() > brightest for shares in both)
    bar = figure.colorbar(image, ax=all_axes, pad=0.015, extend="max" if beyond else "neither")
    bar.set_label("share of the layer's activations, %", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.ax.axhline(100 / experts, color="white", linewidth=1)
    figure.suptitle(
        f"Expert activations (white mark: uniform use, {100 / experts:.3g} %)", fontsize=11, color=INK
    )
    return figure


def _accuracy(plot: Any, calibration: Calibration, about: dict[str, Any]) -> Any:
    layers, experts = calibration.prefill_counts.shape
    figure, (axes,) = _by_layer(plot, layers, 4.8)
    for name in ("raw", "residual"):
        mean = mean_accuracy(calibration, name)
        if mean is not None:
            shares = 100 * calibration.accuracy[name][1:]
            label = f"{NAMES[name]}: {percent(mean, 1)} on average"
            axes.plot(range(1, layers), shares, "o-", color=COLORS[name], label=label, markersize=4)
    first = mean_accuracy(calibration, "first")
    if first is not None:
        label = f"{NAMES['first']}: {percent(first, 1)}"
        axes.plot([0], [100 * first], "D", color=COLORS["first"], label=label, markersize=6)
    used = about.get("experts_of_a_token")
    if isinstance(used, int):
        chance = 100 * used / experts
        axes.axhline(chance, color=FAINT, linewidth=1, linestyle=":", label=f"by chance: {chance:.0f} %")
    axes.set_ylim(0, 102)
    axes.set_ylabel("experts predicted correctly, %", fontsize=9, color=INK)
    _title(axes, "Accuracy of expert prediction, on the validation part of the text")
    _legend(axes)
    return figure


def _similarity(plot: Any, calibration: Calibration) -> Any:
    """DAOP's equation 1 for each layer."""
    layers = len(calibration.similarity)
    figure, (axes,) = _by_layer(plot, layers, 4.8)
    mean = float(calibration.similarity.mean())
    style = {"color": COLORS["raw"], "markersize": 4}
    axes.plot(range(layers), calibration.similarity, "o-", label="of a layer", **style)
    axes.axhline(mean, color=FAINT, linewidth=1, linestyle="--", label=f"mean over layers: {mean:.3f}")
    axes.set_ylim(min(0.0, float(calibration.similarity.min())), 1.02)
    axes.set_ylabel("cosine similarity", fontsize=9, color=INK)
    _title(axes, "Similarity of expert activations in prefill and in decode")
    _legend(axes)
    return figure


def _sensitivity(plot: Any, calibration: Calibration) -> Any:
    """AdapMoE's sensitivities, and below them the experts per token under its gate."""
    sensitivity, needed = calibration.sensitivity, calibration.needed
    assert sensitivity is not None
    layers = len(sensitivity)
    rows = 1 if needed is None else 2
    figure, (axes, *below) = _by_layer(plot, layers, 3.1 * rows + 0.5, rows)
    shown = np.where(sensitivity > 0, sensitivity, np.nan)  # a log scale has no 0
    axes.plot(range(layers), shown, "o-", color=COLORS["raw"], markersize=4)
    axes.set_yscale("log")
    axes.set_ylabel("sum of mean squared gradients (log scale)", fontsize=9, color=INK)
    _title(axes, "Sensitivity of the loss to each layer's expert output")
    if needed is not None:
        _needed(below[0], needed, calibration.threshold)
    axes.set_xlim(-0.6, layers - 0.4)
    return figure


def _needed(axes: Any, needed: NDArray[np.float64], threshold: float | None) -> None:
    """Stacked shares of the tokens by the number of experts they use."""
    layers, most = needed.shape[0], needed.shape[1] - 1
    below = np.zeros(layers)
    from matplotlib import colormaps

    for count in range(1, most + 1):
        shares = 100 * needed[:, count]
        if not shares.any():
            continue
        color = colormaps["viridis"]((most - count) / max(most - 1, 1) * 0.85)
        label = f"{count} expert" + "s" * (count != 1)
        axes.bar(range(layers), shares, bottom=below, width=0.75, color=color, label=label)
        below += shares
    axes.set_ylim(0, 100)
    axes.set_ylabel("tokens of decode, %", fontsize=9, color=INK)
    _title(axes, f"Experts per token under AdapMoE's gate, threshold {threshold or 0:.2g}")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per cent of each layer's activations."""
    shares: NDArray[np.float64] = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _figure(plot: Any, rows: int, columns: int, size: tuple[float, float], **shared: bool) -> Any:
    """The figure and its axes, above a line for the footnote. `size`: inches."""
    figure, grid = plot.subplots(rows, columns, squeeze=False, figsize=size, layout="constrained", **shared)
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))
    return figure, list(grid.flat)


def _by_layer(plot: Any, layers: int, height: float, rows: int = 1) -> Any:
    width = min(max(6.4, 0.22 * layers + 2), 12.0)
    figure, all_axes = _figure(plot, rows, 1, (width, height), sharex=True)
    for axes in all_axes:
        _tidy(axes)
    axes.set_xticks(_ticks(layers))
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_xlabel("layer", fontsize=9, color=INK)
    return figure, all_axes


def _ticks(count: int) -> range:
    """0 to count in steps of 1, 2, 4 ..., so that the labels do not overlap."""
    step = 1
    while count > MOST_TICKS * step:
        step *= 2
    return range(0, count, step)


def _tidy(axes: Any) -> None:
    axes.tick_params(which="both", labelsize=8, colors=INK, length=2)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=10, color=INK, loc="left")


def _legend(axes: Any) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.01, -0.13))


def _footnote(about: dict[str, Any]) -> str:
    model, tokens, machine, when = (about.get(key, "?") for key in ("model", "tokens", "machine", "when"))
    return f"{model}, {tokens} tokens of text; {machine}, {when[:10]}"
