"""`launch.py score`: the perplexity of a text, and with --out every log-probability.

A text longer than the context is scored in windows of one context each, which move by half of it, so that
each token outside the first window is predicted from half a context at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.command_line.checks import (
    check_new_file,
    check_reads_text,
    check_request,
    read_ids,
    read_text,
)
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import plain, print_json, show
from pipeline.assets import model_dir
from pipeline.counters import difference, fidelity
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import F32Matrix, Tokenize
from shm.atomic_file import atomic_file


@contextmanager
def matrix_file(path: Path, positions: int, vocabulary: int) -> Iterator[Callable[[F32Matrix], object]]:
    """Appends blocks of rows to a .npy file of float32 [positions, vocabulary], which replaces `path` when
    the block ends without an exception. Raises OSError."""
    with atomic_file(path) as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (positions, vocabulary)}
        np.lib.format.write_array_header_1_0(file, header)
        yield lambda rows: file.write(np.ascontiguousarray(rows, dtype="<f4").data)


async def score(options: Options, interrupts: Interrupts) -> int:
    """Run `score`. Raises WrongUsage, OutputFailed, RequestFailed and what `reconnecting_client` raises."""
    written = options.written
    out: Path | None = written.get("out")
    if out is not None:
        check_new_file("--out", out)
    text = read_text(written["text"]) if "text" in written else None
    if text is not None and not options.connect:
        check_reads_text(options.config().model or model_dir(), ids="--tokens")
    ids = read_ids(written["tokens"]) if text is None else ()
    async with reconnecting_client(options, interrupts) as client:
        context = client.welcome.context
        requests = await _requests(client, options, text, ids)
        before = await client.stats()
        if out is None:
            count, nll = await _sum(client, requests, None)
        else:
            try:
                with matrix_file(out, requests[-1][0].end, client.welcome.vocabulary) as append:
                    count, nll = await _sum(client, requests, append)
            except OSError as e:
                raise OutputFailed(f"--out {out}: {e.strerror}") from e
        stats = await client.stats()
    kv_cache = "int8" if client.welcome.kv_dtype == "int8" else ""
    counted = difference(stats["engine"], before["engine"])
    exactness = fidelity(client.welcome.exact, counted, kv_cache)
    policy = stats.get("policy", client.welcome.policy)
    mean = nll / (count - 1) if count > 1 else math.nan
    perplexity = math.exp(mean) if mean < 700 else math.inf
    if "json" in written:
        print_json(
            {
                "tokens": count,
                "mean_nll": mean,
                "perplexity": perplexity,
                "windows": len(requests),
                "policy": policy,
                "fidelity": exactness,
                "stats": plain(stats),
            },
            digits=7,  # of float32
        )
    else:
        how = f" ({len(requests)} windows of {context})" if len(requests) > 1 else ""
        words = f"{count} tokens{how}, {mean:.4f} nats a token, perplexity {perplexity:.2f}"
        reasons = [f"KV cache in {kv_cache}"] if kv_cache else []
        if not kv_cache or any(
            share for kind, share in exactness.items() if kind not in ("exact", "kv_cache")
        ):
            reasons.append(f"under {policy}")
        show(words + f"; approximate, {' and '.join(reasons)}" * (not exactness["exact"]) + "\n")
    return 0


@dataclass(frozen=True)
class Window:
    """Tokens of a text, and the rows over them that count: those before `first` count in an earlier window,
    those from `stop` in a later one. Row i predicts token i + 1 of the text."""

    start: int
    end: int
    first: int
    stop: int


def windows_of(tokens: int, context: int) -> Iterator[Window]:
    """Every row counts in one window."""
    end, first, stride = min(context, tokens), 0, max(1, context // 2)
    while end < tokens:
        yield Window(max(0, end - context), end, first, end - 1)
        first, end = end - 1, min(end + stride, tokens)
    yield Window(max(0, end - context), end, first, tokens)


async def _requests(
    client: Client, options: Options, text: str | None, ids: Sequence[int]
) -> list[tuple[Window, dict[str, Any]]]:
    """Each window with the arguments of Client.score. Raises WrongUsage and what `tokenize` raises."""
    welcome, written = client.welcome, options.written
    how = {"stepwise": "stepwise" in written, "full": "out" in written}
    if text is not None:
        if not welcome.has_tokenizer:
            raise WrongUsage("--text: this model has no tokenizer; give --tokens")
        check_request(written["text"], Tokenize(0, text=text))
        ids = (await client.tokenize(text=text)).ids.tolist()
    if len(ids) > welcome.context == 1:
        raise WrongUsage("the engine's context has 1 token; start it with a larger --context")
    largest = welcome.vocabulary - 1
    if ids and max(ids) > largest:
        raise WrongUsage(f"--tokens: {max(ids)} is no token; this model's ids end at {largest}")
    return [
        (w, {"token_ids": ids[w.start : w.end], "prefill": max(1, w.first - w.start), **how})
        for w in windows_of(len(ids), welcome.context)
    ]


async def _sum(
    client: Client,
    requests: Sequence[tuple[Window, dict[str, Any]]],
    append: Callable[[F32Matrix], object] | None,
) -> tuple[int, float]:
    """Tokens, and the sum of their negative log-probabilities in nats (the first token has none)."""
    count, nll = 0, 0.0
    for window, request in requests:
        async for block in client.score(**request):
            at = window.start + block.start
            rows = slice(max(window.first - at, 0), max(min(window.stop - at, len(block.tokens)), 0))
            count += len(block.tokens[rows])
            nll -= float(block.chosen[rows].sum(dtype=np.float64))
            if append is not None:
                append(block.logprobs[rows])
    if math.isnan(nll):
        raise RequestFailed("the model's logits are not finite")
    return count, nll
