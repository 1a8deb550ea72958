"""Chooses the size of a prefill chunk by timing this engine's own prefill."""

from __future__ import annotations

import time

import numpy as np

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.engine.engine import Engine
from pipeline.memory.limits import CHUNK_MAX

CHUNK_SECONDS = 0.25  # target duration of a chunk
ALONE = 8  # factor of the chunk of a lone request: a second request waits a second or two at most
TRIAL_TOKENS = 64
TRIAL_SECONDS = 1.0  # no trial begins after this: the first request waits for them


def measure_chunks(engine: Engine, kv: KVCache, context: int) -> tuple[int, int]:
    """Prefill tokens that take about CHUNK_SECONDS, by the fastest of up to three trials (a power of two,
    so that a little noise does not change it), and the larger chunk of an engine's only request."""
    count = min(TRIAL_TOKENS, context)
    tokens = np.linspace(0, engine.backbone.spec.vocabulary - 1, count).astype(int).tolist()
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < TRIAL_SECONDS:
        sequence = kv.allocate(count)
        started = time.perf_counter()
        engine.step([StepInput(TokenSpan(sequence, tokens), "none")], "prefill")
        seconds.append(time.perf_counter() - started)
        kv.release(sequence)
    wanted = count * CHUNK_SECONDS / min(seconds)
    chunk = int(min(max(2 ** int(np.log2(wanted)), 16), CHUNK_MAX, context))
    return chunk, min(ALONE * chunk, CHUNK_MAX, context)
