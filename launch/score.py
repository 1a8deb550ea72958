"""`launch.py score`: the perplexity of a text, and with --out every log-probability."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

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


class MatrixFile:
    """A .npy file of float32 [positions, vocabulary], written block by block."""

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self._file = file
        self._vocabulary = vocabulary
        self._rows = 0
        self.write_header()

    def append(self, rows: F32Matrix) -> None:
        """[n, vocabulary]"""
        self._file.write(np.ascontiguousarray(rows, dtype="<f4").data)
        self._rows += len(rows)

    def write_header(self) -> None:
        """Write or update the header, which holds the number of rows."""
        self._file.seek(0)
        # numpy pads a header so that its first dimension can grow in place
        shape = (self._rows, self._vocabulary)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )


@contextmanager
def matrix_file(path: Path, vocabulary: int) -> Iterator[MatrixFile]:
    """A MatrixFile that replaces `path` when the block ends without an exception. Raises OSError."""
    with atomic_file(path) as file:
        matrix = MatrixFile(file, vocabulary)
        yield matrix
        matrix.write_header()


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
                with matrix_file(out, client.welcome.vocabulary) as matrix:
                    count, nll = await _sum(client, asked, matrix)
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


async def _sum(client: Client, asked: dict[str, Any], matrix: MatrixFile | None) -> tuple[int, float]:
    """Tokens, and the sum of their negative log-probabilities in nats (the first token has none)."""
    count, nll = 0, 0.0
    async for block in client.score(**asked):
        count += len(block.tokens)
        nll -= float(block.chosen.sum(dtype=np.float64))
        if matrix is not None:
            matrix.append(block.logprobs)
    return count, nll
