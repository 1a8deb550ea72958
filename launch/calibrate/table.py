"""What a calibration found, as a table that fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pipeline.calibration.summary import experts_per_token
from pipeline.policies.calibration import Calibration

MOST_ROWS = 64  # layers that are listed


def render(
    path: Path, found: dict[str, Any], calibration: Calibration | None, pictures: Sequence[Path]
) -> str:
    """With colours for a terminal, else plain."""
    console = Console(highlight=False)
    parts: list[Table | Text] = []
    if calibration is not None and len(calibration.similarity) <= MOST_ROWS:
        parts += [_layers(calibration, console.is_terminal), Text()]
    parts.append(_means(found))
    with console.capture() as captured:
        console.print(Group(*parts, *(Text(f"note: {note}") for note in found["notes"])))
    # Paths are not wrapped: they are copied.
    lines = [line.rstrip() for line in captured.get().splitlines()]
    lines += [f"kept: {path}", *(f"drawn: {picture}" for picture in pictures)]
    return "\n".join(lines) + "\n"


def _layers(calibration: Calibration, terminal: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, 1 if terminal else 2, 0, 0),
        show_edge=False,
        header_style="bold",
    )
    heads = ("layer", "next gate\n%", "residual\n%", "alike", "sensi-\ntivity", "experts\na token")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    raw, residual, first = (calibration.accuracy[name] for name in ("raw", "residual", "first"))
    used = None if calibration.needed is None else experts_per_token(calibration.needed)
    for layer, similarity in enumerate(calibration.similarity):
        predicted = [f"{100 * accuracy[layer]:.1f}" for accuracy in (raw, residual)]
        if layer == 0:
            predicted = ["-" if calibration.first_gate is None else f"{100 * first[0]:.1f}*", "-"]
        table.add_row(
            str(layer),
            *predicted,
            f"{similarity:.3f}",
            "-" if calibration.sensitivity is None else f"{calibration.sensitivity[layer]:.2g}",
            "-" if used is None else f"{used[layer]:.2f}",
        )
    return table


def _means(found: dict[str, Any]) -> Text:
    accuracy = found["accuracy"]
    rest = "; the rest of the text was left out" if found.get("cut") else ""
    lines = [
        f"{found['model']}: {found['tokens']} tokens{rest}",
        f"next layer's experts foreseen: {_percent(accuracy['raw'])} by its gate on this layer's input,"
        f" {_percent(accuracy['residual'])} with the residual",
        f"first layer's (*) from the token before: {_percent(accuracy['first'])} by a trained gate",
        f"prefill and decode are alike by {found['similarity']:.3f} (cosine of a text's counts)",
    ]
    if loss := found["loss"]:
        lines.append(
            f"threshold {found['threshold']:.3g}: {_percent(found['single_expert_share'])} of decode's tokens"
            f" use one expert, {found['experts_per_token']:.2f} on average; their loss goes from"
            f" {loss['exact']:.4f} to {loss['gated']:.4f} nats a token"
        )
    return Text("\n".join(lines))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
