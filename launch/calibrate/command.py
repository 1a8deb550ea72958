"""`launch.py calibrate`: the model reads a text once; what policies plan with is kept in a file: routing
statistics, residuals, sensitivities. --report draws it; without a text, an earlier calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.calibrate.figures import check_folder, draw
from launch.calibrate.table import render
from launch.command_line.checks import check_request, read_ids, read_text
from launch.command_line.options import Options
from launch.connect.reconnect import reconnecting_client
from launch.errors import WrongUsage
from launch.runtime import cache_root
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressDisplay
from pipeline.assets import model_dir
from pipeline.calibration.file import calibration_path, read
from pipeline.calibration.summary import summary
from pipeline.checkpoint.open import open_model
from pipeline.policies.calibration import Calibration
from protocol.messages import Calibrate, Calibrating

CHARACTERS = 16  # more than any token has; the text beyond is not sent


async def calibrate(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, OutputFailed, CalibrationError, RequestFailed; as `reconnecting_client`."""
    written = options.written
    folder: Path | None = written.get("report")
    if folder is not None:
        check_folder(folder)
    if "text" in written or "tokens" in written:
        path, found = await _calibrate(options, interrupts)
        # A remote engine's answer holds the summary; the arrays are on its machine.
        calibration = None if options.remote is not None else read(path)[0]
    else:
        path, calibration, found = _earlier(options)
    pictures = [] if folder is None or calibration is None else draw(calibration, found, folder)
    if "json" in written:
        print_json(found | {"path": str(path), "report": [str(picture) for picture in pictures]})
    else:
        show(render(path, found, calibration, pictures))
    return 0


async def _calibrate(options: Options, interrupts: Interrupts) -> tuple[Path, dict[str, Any]]:
    """The file's path on the engine's machine, and the summary."""
    written = options.written
    most = written.get("calibrate_tokens", Calibrate.tokens)
    asked, cut = _asked(written, most)
    check_request(written.get("text") or written["tokens"], Calibrate(0, tokens=most, **asked))
    async with reconnecting_client(_with_costs(options), interrupts) as client:
        if "text" in asked and not client.welcome.has_tokenizer:
            raise WrongUsage("--text: this model has no tokenizer; give --tokens")
        with ProgressDisplay("items") as display:

            def show_progress(progress: Calibrating) -> None:
                display.update(f"calibrate: {progress.stage}", progress.done, progress.total)

            done = await client.calibrate(tokens=most, on_progress=show_progress, **asked)
    return Path(done.path), done.summary | {"cut": cut or done.summary["left_out"] > 0}


def _with_costs(options: Options) -> Options:
    """For a new engine: a policy that plans with costs measures them too; no expert need be resident."""
    if options.connect or "policy" in options.written:
        return options
    return replace(options, written={"expert_cache": 0.0} | options.written | {"policy": "fiddler"})


def _asked(written: dict[str, Any], most: int) -> tuple[dict[str, Any], bool]:
    """The text or its ids, and whether they were cut to what `most` tokens need. Raises WrongUsage."""
    if "text" in written:
        text = read_text(written["text"])
        return {"text": text[: CHARACTERS * most]}, len(text) > CHARACTERS * most
    ids = read_ids(written["tokens"])
    return {"token_ids": ids[:most]}, len(ids) > most


def _earlier(options: Options) -> tuple[Path, Calibration, dict[str, Any]]:
    """The kept calibration: path, arrays, summary. Raises WrongUsage, CalibrationError."""
    model = options.config().model or model_dir()
    path = calibration_path(cache_root(), open_model(model))
    if not path.exists():
        raise WrongUsage(f"--report: {model} has not been calibrated on this machine; add --text F")
    calibration, about = read(path)
    return path, calibration, summary(calibration, about)
