"""`launch.py calibrate`: the model reads a text once; what policies plan with is kept in a file: routing
statistics, residuals, sensitivities. --report draws it; without a text, an earlier calibration."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

from launch.calibrate.figures import check_folder, draw
from launch.calibrate.table import render
from launch.command_line.checks import check_request, read_ids, read_text
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressDisplay
from pipeline.assets import model_dir
from pipeline.calibration.file import calibration_path, read
from pipeline.calibration.summary import summary
from pipeline.calibration.windows import HELD_OUT, LANES
from pipeline.checkpoint.open import open_model
from pipeline.policies.calibration import Calibration
from protocol.messages import CALIBRATION_TOKENS, Calibrate, Calibrating
from protocol.user_folders import user_folder

CHARACTERS = 16  # more than tokens have: of a text longer than this for each token excerpts are sent
EXCERPTS = HELD_OUT * LANES  # of a longer text: a window is read from each, unless they are large

Text = TypeVar("Text", str, tuple[int, ...])


async def calibrate(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, OutputFailed, CalibrationError, RequestFailed; as `reconnecting_client`."""
    written = options.written
    folder: Path | None = written.get("report")
    if folder is not None:
        check_folder(folder)
    if "text" in written or "tokens" in written:
        path, found = await _calibrate(options, interrupts)
        calibration = read(path)[0]
    else:
        path, calibration, found = _earlier(options)
    pictures = [] if folder is None else draw(calibration, found, folder)
    if "json" in written:
        print_json(found | {"path": str(path), "report": [str(picture) for picture in pictures]})
    else:
        show(render(path, found, calibration, pictures, _engine(options)), rendered=True)
    return 0


async def _calibrate(options: Options, interrupts: Interrupts) -> tuple[Path, dict[str, Any]]:
    """The file's path on the engine's machine, and the summary."""
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
    """For a new engine: a policy that plans with costs measures them too; no expert need be resident."""
    if options.connect or "policy" in options.written:
        return options
    return replace(options, written={"expert_cache": 0.0} | options.written | {"policy": "fiddler"})


def _asked(written: dict[str, Any], most: int) -> dict[str, Any]:
    """The arguments of `Client.calibrate` for the text or its ids. Raises WrongUsage."""
    if "text" in written:
        text = read_text(written["text"])
        parts, starts = _excerpts(text, CHARACTERS * most)
        return {"text": "".join(parts), "starts": starts, "share": _share(parts, text)}
    ids = read_ids(written["tokens"])
    pieces, starts = _excerpts(ids, most)
    return {"token_ids": tuple(chain(*pieces)), "starts": starts, "share": _share(pieces, ids)}


def _engine(options: Options) -> str:
    """The options by which other commands use the calibrated model."""
    if options.connect:
        return f" --connect {options.connect_name or ''}".rstrip()
    model = options.written.get("model")
    return "" if model is None else f" --model {shlex.quote(str(model))}"


def _share(parts: list[Text], whole: Text) -> float:
    return sum(map(len, parts)) / len(whole) if whole else 1.0


def _excerpts(whole: Text, most: int) -> tuple[list[Text], tuple[int, ...]]:
    """All of a text (or of its ids), or EXCERPTS parts of equal length, `most` in all and evenly spaced over
    it; and where the second and further ones begin in their concatenation."""
    if len(whole) <= most:
        return [whole], ()
    begins = (len(whole) * i // EXCERPTS for i in range(EXCERPTS))
    parts = [
        whole[begin : begin + most * (i + 1) // EXCERPTS - most * i // EXCERPTS]
        for i, begin in enumerate(begins)
    ]
    return parts, tuple(accumulate(map(len, parts[:-1])))


def _earlier(options: Options) -> tuple[Path, Calibration, dict[str, Any]]:
    """The kept calibration: path, arrays, summary. Raises WrongUsage, CalibrationError."""
    model = options.config().model or model_dir()
    path = calibration_path(user_folder("CACHE"), open_model(model))
    if not path.exists():
        raise WrongUsage(f"--report: {model} has not been calibrated on this machine; add --text F")
    calibration, about = read(path)
    return path, calibration, summary(calibration, about)
