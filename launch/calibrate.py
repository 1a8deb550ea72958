"""`launch.py calibrate`: the model reads a text once; what policies plan with is kept in a file: routing
statistics, residuals, sensitivities. --report draws it; without a text, an earlier calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType

from launch.command_line.checks import check_new_file, check_packages, check_request, read_ids, read_text
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import WrongUsage
from launch.terminal.format import percent
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.plot import Panel, Series, draw
from launch.terminal.progress import ProgressDisplay
from launch.terminal.tables import Column, Table, each, print_parts
from pipeline.assets import model_dir
from pipeline.calibration import HELD_OUT, LANES
from pipeline.calibration.file import calibration_path, experts_per_token, read, summary
from pipeline.checkpoint.open import open_model
from pipeline.policies.calibration import Calibration
from protocol.messages import CALIBRATION_TOKENS, Calibrate, Calibrating
from protocol.program import user_folder, visible

MOST_LAYERS = 64  # a model with more gets the mean values only
PICTURE = "report.png"
CHARACTERS = 16  # more than tokens have: of a text longer than this for each token excerpts are sent
EXCERPTS = HELD_OUT * LANES  # of a longer text: a window is read from each, unless they are large

Text = TypeVar("Text", str, tuple[int, ...])


async def calibrate(options: Options, interrupts: Interrupts) -> int:
    """Run `calibrate`. Raises WrongUsage, OutputFailed, CalibrationError, RequestFailed; as
    `reconnecting_client`."""
    written = options.written
    folder: Path | None = written.get("report")
    if folder is not None:
        _prepare(folder)
    if "text" in written or "tokens" in written:
        path, about = await _calibrate(options, interrupts)
        calibration = read(path)[0]
    else:
        path, calibration, about = _earlier(options)
    pictures = []
    if folder is not None:
        pictures = [folder / PICTURE]
        _draw(calibration, about, pictures[0])
    if "json" in written:
        print_json(about | {"path": str(path), "report": [str(picture) for picture in pictures]})
        return 0
    print_parts(*_parts(about, calibration))
    # Paths are not wrapped, so that they can be copied.
    show(visible("".join([f"saved: {path}\n", *(f"figure: {picture}\n" for picture in pictures)])))
    return 0


def _prepare(folder: Path) -> None:
    """Create the folder. Raises WrongUsage where no file can be created in it, or without matplotlib."""
    check_packages("--report", "matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise WrongUsage(f"--report {folder}: no folder can be made there: {e.strerror}") from None
    check_new_file("--report", folder / PICTURE)


async def _calibrate(options: Options, interrupts: Interrupts) -> tuple[Path, dict[str, Any]]:
    """Returns the file's path on the engine's machine, and the summary."""
    written = options.written
    most = written.get("calibrate_tokens", CALIBRATION_TOKENS)
    asked = _asked(written, most)
    asked["max_loss"] = written.get("max_loss")
    check_request(written.get("text") or written["tokens"], Calibrate(0, tokens=most, **asked))
    async with reconnecting_client(_with_costs(options), interrupts) as client:
        if "text" in asked and not client.welcome.has_tokenizer:
            raise WrongUsage("--text: this model has no tokenizer; give --tokens")
        with ProgressDisplay("items") as display:

            def show_progress(progress: Calibrating) -> None:
                display.update(f"calibrate: {progress.stage}", progress.done, progress.total)

            done = await client.calibrate(tokens=most, on_progress=show_progress, **asked)
    return Path(done.path), done.summary


def _with_costs(options: Options) -> Options:
    """Give a new engine a policy that plans with costs, so that it measures them, and no resident expert."""
    if options.connect or "policy" in options.written:
        return options
    return replace(options, written={"expert_cache": 0.0} | options.written | {"policy": "fiddler"})


def _asked(written: dict[str, Any], most: int) -> dict[str, Any]:
    """Returns the arguments of `Client.calibrate` for the text or its ids. Raises WrongUsage."""
    if "text" in written:
        text = read_text(written["text"])
        parts, starts = _excerpts(text, CHARACTERS * most)
        return {"text": "".join(parts), "starts": starts, "share": _share(parts, text)}
    ids = read_ids(written["tokens"])
    pieces, starts = _excerpts(ids, most)
    return {"token_ids": tuple(chain(*pieces)), "starts": starts, "share": _share(pieces, ids)}


def _share(parts: list[Text], whole: Text) -> float:
    return sum(map(len, parts)) / len(whole) if whole else 1.0


def _excerpts(whole: Text, most: int) -> tuple[list[Text], tuple[int, ...]]:
    """Returns all of a text (or of its ids), or EXCERPTS parts of equal length, `most` in all and evenly
    spaced over it; and where the second and further ones begin in their concatenation."""
    if len(whole) <= most:
        return [whole], ()
    begins = (len(whole) * i // EXCERPTS for i in range(EXCERPTS))
    parts = [
        whole[begin : begin + most * (i + 1) // EXCERPTS - most * i // EXCERPTS]
        for i, begin in enumerate(begins)
    ]
    return parts, tuple(accumulate(map(len, parts[:-1])))


def _earlier(options: Options) -> tuple[Path, Calibration, dict[str, Any]]:
    """Returns the kept calibration: path, arrays, summary. Raises WrongUsage, CalibrationError."""
    model = options.config().model or model_dir()
    path = calibration_path(user_folder("CACHE"), open_model(model))
    if not path.exists():
        raise WrongUsage(f"--report: {model} has not been calibrated on this machine; add --text F")
    calibration, about = read(path)
    return path, calibration, summary(calibration, about)


def _layers(calibration: Calibration) -> Sequence[Column[int]]:
    """Returns what is known of each layer; a predictor of layer 0 is another one than those of the others."""
    raw, residual, first = (100 * calibration.accuracy[name] for name in ("raw", "residual", "first"))
    gate, sensitivity, needed = calibration.first_gate, calibration.sensitivity, calibration.needed
    used = None if needed is None else experts_per_token(needed)
    percents = each("{:.1f}".format)
    return [
        Column("layer", lambda layer: layer),
        Column("router\npredicts %", lambda layer: raw[layer] if layer else None, percents),
        Column("residual\npredicts %", lambda layer: residual[layer] if layer else None, percents),
        Column("gate\npredicts %", lambda layer: None if layer or gate is None else first[0], percents),
        Column(
            "sensitivity\nof the loss",
            lambda layer: None if sensitivity is None else sensitivity[layer],
            each("{:.1e}".format),
        ),
        Column(
            "experts\nper token", lambda layer: None if used is None else used[layer], each("{:.2f}".format)
        ),
    ]


def _draw(calibration: Calibration, about: dict[str, Any], path: Path) -> None:
    """Write a page with a panel for each column of the table. Raises OutputFailed."""
    panels = []
    for column in _layers(calibration)[1:]:
        values = {layer: column.value(layer) for layer in range(len(calibration.decode_counts))}
        series = Series("", {layer: [float(of)] for layer, of in values.items() if of is not None})
        if len(series.values) > 1:
            panels.append(Panel(column.title.replace("\n", " "), [series], "layer"))
    model, tokens, machine, when = (about.get(key, "?") for key in ("model", "tokens", "machine", "when"))
    rows = [row for row in (panels[:3], panels[3:]) if row]
    draw(path, rows, f"{model}, {tokens} tokens of text", f"{machine}, {when[:10]}", shared=False)


def _parts(about: dict[str, Any], calibration: Calibration) -> Iterator[RenderableType]:
    """Returns the calibration as a table and lines of text."""
    if len(calibration.decode_counts) <= MOST_LAYERS:
        yield from (Table(_layers(calibration), range(len(calibration.decode_counts))), "")
    accuracy, share = about["accuracy"], about.get("share", 1)
    part = f"{percent(share, 1)} of the text, in windows evenly spaced over it"
    yield f"{about['model']}: {about['tokens']} tokens, {'the whole text' if share == 1 else part}"
    yield (
        f"next layer's experts predicted: {percent(accuracy['raw'], 1)} by its router on this layer's input,"
        f" {percent(accuracy['residual'], 1)} with the mean residual added"
    )
    if (corrected := accuracy.get("mlp")) is not None:  # FloE's predictor
        yield f"the same with the first layers' routers corrected by trained MLPs: {percent(corrected, 1)}"
    yield (
        "first layer's experts predicted from the previous token by a trained gate:"
        f" {percent(accuracy['first'], 1)}"
    )
    if loss := about["loss"]:
        yield (
            f"adaptive gating, threshold {about['threshold']:.3g}: {percent(about['single_expert_share'], 1)}"
            f" of decode's tokens use one expert, {about['experts_per_token']:.2f} on average; the loss goes"
            f" from {loss['exact']:.4f} to {loss['gated']:.4f} nats per token"
        )
    if bounded := about.get("bounded"):
        yield f"at most {about['max_loss']:g} % more perplexity:"
        yield from (f"{name}: {setting}" for name, setting in bounded.items())
    if bounded and about["sparsities"]:
        curve = ", ".join(f"{share:g}: {perplexity:.4g}" for share, perplexity in about["sparsities"])
        yield f"perplexity by sparsity (--set sparsity=auto takes the largest): {curve}"
    yield from (f"note: {note}" for note in about["notes"])
