"""`launch.py calibrate`: the model reads a text once; what policies plan with is kept in a file: routing
statistics, residuals, sensitivities."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeVar

from launch.command_line.checks import check_one_device, check_reads_text, check_request, read_ids, read_text
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import WrongUsage
from launch.terminal.format import percent
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressDisplay
from launch.terminal.tables import print_parts
from pipeline.assets import model_dir
from pipeline.calibration import HELD_OUT, LANES
from protocol.messages import CALIBRATION_TOKENS, Calibrate, Calibrating
from protocol.program import visible

CHARACTERS = 16  # more than tokens have: of a text longer than this for each token parts are sent
PARTS = HELD_OUT * LANES  # of a longer text

Text = TypeVar("Text", str, tuple[int, ...])


async def calibrate(options: Options, interrupts: Interrupts) -> int:
    """Run `calibrate`. Raises WrongUsage, OutputFailed, RequestFailed; as `reconnecting_client`."""
    written = options.written
    if not options.connect:
        check_one_device(options.config(), "calibrate")
    most = written.get("calibrate_tokens", CALIBRATION_TOKENS)
    asked: dict[str, Any] = {"tokens": most, "max_loss": written.get("max_loss")}
    if "text" in written:
        if not options.connect:
            check_reads_text(options.config().model or model_dir(), ids="--tokens")
        asked["text"] = "\n".join(_parts(read_text(written["text"]), CHARACTERS * most))
    else:
        asked["token_ids"] = tuple(chain(*_parts(read_ids(written["tokens"]), most)))
    check_request(written.get("text") or written["tokens"], Calibrate(0, **asked))
    async with reconnecting_client(options, interrupts) as client:
        if "text" in asked and not client.welcome.has_tokenizer:
            raise WrongUsage("--text: this model has no tokenizer; give --tokens")
        with ProgressDisplay("items") as display:

            def show_progress(progress: Calibrating) -> None:
                display.update(f"calibrate: {progress.stage}", progress.done, progress.total)

            done = await client.calibrate(on_progress=show_progress, **asked)
    if "json" in written:
        print_json(done.summary | {"path": done.path})
        return 0
    print_parts(*_lines(done.summary))
    show(visible(f"saved: {done.path}\n"))  # not wrapped, so that it can be copied
    return 0


def _parts(whole: Text, most: int) -> list[Text]:
    """Returns all of a text (or of its ids), or PARTS of equal length, `most` in all and evenly spaced over
    it."""
    if len(whole) <= most:
        return [whole]
    begins = (len(whole) * i // PARTS for i in range(PARTS))
    return [
        whole[begin : begin + most * (i + 1) // PARTS - most * i // PARTS] for i, begin in enumerate(begins)
    ]


def _lines(about: dict[str, Any]) -> Iterator[str]:
    """Returns the calibration as lines of text."""
    accuracy = about["accuracy"]
    yield f"{about['model']}: {about['tokens']} tokens"
    yield (
        f"next layer's experts predicted: {percent(accuracy['raw'], 1)} by its router on this layer's input,"
        f" {percent(accuracy['residual'], 1)} with the mean residual added"
    )
    yield (
        "first layer's experts predicted from the previous token by a trained gate:"
        f" {percent(accuracy['first'], 1)}"
    )
    if loss := about["loss"]:
        yield (
            f"adaptive gating, threshold {about['threshold']:.3g}: {percent(about['single_expert_share'], 1)}"
            f" of decode's tokens use one expert; the loss goes from {loss['exact']:.4f} to"
            f" {loss['gated']:.4f} nats per token"
        )
    if about["sparsities"]:
        curve = ", ".join(f"{share:g}: {perplexity:.4g}" for share, perplexity in about["sparsities"])
        yield f"perplexity by sparsity (--set sparsity=auto takes {about['sparsity']:g}): {curve}"
    yield from (f"note: {note}" for note in about["notes"])
