"""`launch.py score`: the perplexity of a text, and with --out every log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from launch.command_line.checks import check_output, check_request, read_ids, read_text
from launch.command_line.options import Options
from launch.connect.reconnect import reconnecting_client
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from pipeline.counters import difference, fidelity
from protocol.client import Client
from protocol.messages import F32Matrix, Score
from shm.atomic_file import atomic_file


@contextmanager
def matrix_file(path: Path, vocabulary: int) -> Iterator[Callable[[F32Matrix], None]]:
    """Appends blocks of rows to a .npy file of float32 [positions, vocabulary], which replaces `path` when
    the block ends without an exception. Raises OSError."""
    positions = 0
    with atomic_file(path) as file:

        def write_header() -> None:
            # numpy pads a header so that its first dimension can grow in place
            header = {"descr": "<f4", "fortran_order": False, "shape": (positions, vocabulary)}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)

        def append(rows: F32Matrix) -> None:
            nonlocal positions
            file.write(np.ascontiguousarray(rows, dtype="<f4").data)
            positions += len(rows)

        write_header()
        yield append
        write_header()


async def score(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, OutputFailed, RequestFailed and what `reconnecting_client` raises."""
    written = options.written
    out: Path | None = written.get("out")
    if out is not None:
        check_output(out)
    asked: dict[str, Any] = (
        {"text": read_text(written["text"])}
        if "text" in written
        else {"token_ids": read_ids(written["tokens"])}
    )
    asked |= {
        "stepwise": "stepwise" in written,
        "prefill": written.get("prefill", 1),
        "full": out is not None,
    }
    check_request(written.get("text") or written["tokens"], Score(0, **asked))
    async with reconnecting_client(options, interrupts) as client:
        if "text" in asked and not client.welcome.has_tokenizer:
            raise WrongUsage("--text: this model has no tokenizer; give --tokens")
        before = await client.stats()
        if out is None:
            count, nll = await _sum(client, asked, None)
        else:
            try:
                with matrix_file(out, client.welcome.vocabulary) as append:
                    count, nll = await _sum(client, asked, append)
            except OSError as e:
                raise OutputFailed(f"--out {out}: {e.strerror}") from e
        stats = await client.stats()
    mean = nll / (count - 1) if count > 1 else math.nan
    perplexity = math.exp(mean) if mean < 700 else math.inf
    if "json" in written:
        print_json(
            {
                "tokens": count,
                "mean_nll": mean,
                "perplexity": perplexity,
                "policy": stats.get("policy", client.welcome.policy),
                "fidelity": fidelity(client.welcome.exact, difference(stats["engine"], before["engine"])),
                "stats": stats,
            }
        )
    else:
        show(f"{count} tokens, {mean:.4f} nats a token, perplexity {perplexity:.2f}\n")
    return 0


async def _sum(
    client: Client, asked: dict[str, Any], append: Callable[[F32Matrix], None] | None
) -> tuple[int, float]:
    """Tokens, and the sum of their negative log-probabilities in nats (the first token has none)."""
    count, nll = 0, 0.0
    async for block in client.score(**asked):
        count += len(block.tokens)
        nll -= float(block.chosen.sum(dtype=np.float64))
        if append is not None:
            append(block.logprobs)
    return count, nll
