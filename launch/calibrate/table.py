"""A calibration as a table that fits 80 columns, with its mean values below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.terminal import tables
from launch.terminal.format import MISSING, percent
from pipeline.calibration.file import experts_per_token
from pipeline.policies.calibration import Calibration
from protocol.program import COMMAND
from protocol.visible import visible

PREDICTORS = ("raw", "residual")
MOST_ROWS = 64  # a model with more layers gets the mean values only


def render(
    path: Path,
    found: dict[str, Any],
    calibration: Calibration | None,
    pictures: Sequence[Path],
    engine: str,
) -> str:
    """`engine`: the options by which other commands use this model, each with a space before it."""
    parts: list[Table | Text] = []
    if calibration is not None and len(calibration.similarity) <= MOST_ROWS:
        parts += [_layers(calibration), Text()]
    text = tables.render(*parts, _means(found), *(Text(f"note: {note}") for note in found["notes"]))
    # Paths are not wrapped, so that they can be copied.
    files = [f"saved: {path}\n", *(f"figure: {picture}\n" for picture in pictures)]
    # Without a calibration, by one where there is one, only with one that has a threshold.
    policies = "all-host,fiddler" + ",adapmoe" * (found["threshold"] is not None)
    then = f"next: {COMMAND} bench --policy {policies}{engine} compares policies that use it\n"
    return text + visible("".join([*files, then]))


def _layers(calibration: Calibration) -> Table:
    names = ("router", "residual", "prefill ~", "sensitivity", "experts")
    units = ("predicts", "predicts", "decode", "of the loss", "per token")
    headings = [f"{name}\n{unit}" for name, unit in zip(names, units, strict=True)]
    table = tables.make_table(numbers=("\nlayer", *headings))
    raw, residual, first = (calibration.accuracy[name] for name in ("raw", "residual", "first"))
    used = None if calibration.needed is None else experts_per_token(calibration.needed)
    for layer, similarity in enumerate(calibration.similarity):
        predicted = [percent(accuracy[layer], 1) for accuracy in (raw, residual)]
        if layer == 0:
            predicted = [MISSING if calibration.first_gate is None else f"*{percent(first[0], 1)}", MISSING]
        table.add_row(
            str(layer),
            *predicted,
            f"{similarity:.3f}",
            MISSING if calibration.sensitivity is None else f"{calibration.sensitivity[layer]:.1e}",
            MISSING if used is None else f"{used[layer]:.2f}",
        )
    return table


def _means(found: dict[str, Any]) -> Text:
    accuracy = found["accuracy"]
    lines = [
        f"{found['model']}: {_read(found)}",
        *_hits(found.get("hits") or {}),
        f"next layer's experts predicted: {percent(accuracy['raw'], 1)} by its router on this layer's input,"
        f" {percent(accuracy['residual'], 1)} with the mean residual added",
        *_corrected(accuracy.get("mlp")),
        f"first layer's experts (*) predicted from the previous token by a trained gate:"
        f" {percent(accuracy['first'], 1)}",
        f"similarity of expert activations in prefill and decode (cosine): {found['similarity']:.3f}",
    ]
    if loss := found["loss"]:
        lines.append(
            f"adaptive gating, threshold {found['threshold']:.3g}: {percent(found['single_expert_share'], 1)}"
            f" of decode's tokens use one expert, {found['experts_per_token']:.2f} on average; the loss goes"
            f" from {loss['exact']:.4f} to {loss['gated']:.4f} nats per token"
        )
    return Text("\n".join([*lines, *_bounded(found)]))


def _bounded(found: dict[str, Any]) -> list[str]:
    """With --max-loss: the setting of each approximate preset, or why it has none."""
    bounded = found.get("bounded") or {}
    if not bounded:
        return []
    lines = [f"{name}: {setting}" for name, setting in bounded.items()]
    curve = ", ".join(f"{share:g}: {perplexity:.4g}" for share, perplexity in found["sparsities"])
    return [
        f"at most {found['max_loss']:g} % more perplexity:",
        *lines,
        *[f"perplexity by sparsity (--set sparsity=auto takes the largest): {curve}"] * bool(curve),
    ]


def _corrected(accuracy: float | None) -> list[str]:
    """FloE's predictor, if it was trained."""
    if accuracy is None:
        return []
    return [f"the same with the first layers' routers corrected by trained MLPs: {percent(accuracy, 1)}"]


def _read(found: dict[str, Any]) -> str:
    """How much of the text was read."""
    share = found.get("share")
    if share is None:  # an older file
        return f"{found['tokens']} tokens"
    if share == 1:
        return f"{found['tokens']} tokens, the whole text"
    windows = f"{found['windows']} windows, evenly spaced over the text"
    return f"{found['tokens']} tokens in {windows}: {percent(share, 1)} of it"


def _hits(hits: dict[str, Any]) -> list[str]:
    """The use of placing experts by this text, and a line where the engine's clients run another kind."""
    if not hits:
        return []
    heldout, own = percent(hits["heldout"]), hits["own"]
    placed = (
        f"with the {percent(hits['share'])} of the experts resident that this text uses most, {heldout} of"
        " those that its held-out part needs would be resident"
    )
    if own is None:
        return [placed]
    before = f"{percent(own)} of those used by the {hits['tokens']} tokens that the engine has computed"
    lines = [f"{placed}, and {before}"]
    if hits["differs"]:
        lines.append(
            f"warning: the text routes differently from what the engine runs ({percent(own)} of those used"
            f" there, {percent(hits['prompts'])} of those used by the text's own prompts); give text of the"
            " kind that you run"
        )
    return lines
