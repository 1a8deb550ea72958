"""Reads windows with the engine: prompts by prefill, the rest decoded together, one token of each a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.calibration.windows import Window
from pipeline.counters import Counters
from pipeline.engine.engine import Engine
from pipeline.engine.observer import Observer
from pipeline.text.logprobs import log_softmax

Passed = Callable[[int], None]  # takes the number of tokens just read; its exceptions end the reading


class TokenCount:
    """Counts a stage's tokens."""

    def __init__(self, progress: Callable[[str, int, int], None], stage: str, done: int, total: int) -> None:
        self._progress, self._stage, self._done, self._total = progress, stage, done, total

    def more(self, tokens: int) -> None:
        self._done += tokens
        self._progress(self._stage, self._done, self._total)


class Lanes:
    """Windows with their sequences in the KV cache; made by `lanes`."""

    def __init__(self, engine: Engine, held: Sequence[tuple[Window, SequenceKV]], chunk: int) -> None:
        self._engine, self._held, self._chunk = engine, held, chunk

    def read_prompts(self, passed: Passed) -> None:
        """Read the prompts by prefill, each at most `chunk` tokens a step."""
        for window, kv in self._held:
            while kv.length < window.prefill:
                tokens = window.tokens[kv.length : min(kv.length + self._chunk, window.prefill)]
                self._engine.step([StepInput(TokenSpan(kv, tokens), "none")], "prefill")
                passed(len(tokens))

    def read_answers(self, passed: Passed) -> None:
        """Decode from the end of the prompts; may be repeated."""
        for _ in self._answers(passed, scored=False):
            pass

    def loss(self, passed: Passed) -> float:
        """Read the answers; returns the mean negative log-probability of the answers' tokens, in nats, each
        predicted from an answer's token before it."""
        losses = list(self._answers(passed, scored=True))
        return sum(losses) / len(losses)

    def _answers(self, passed: Passed, scored: bool) -> Iterator[float]:
        for window, kv in self._held:
            kv.truncate(window.prefill)
        while live := [(window, kv) for window, kv in self._held if kv.length < len(window.tokens)]:
            spans = [TokenSpan(kv, [window.tokens[kv.length]]) for window, kv in live]
            rows = self._engine.step([StepInput(s, "last" if scored else "none") for s in spans], "decode")
            if scored:
                for (window, kv), logits in zip(live, rows, strict=True):
                    if kv.length < len(window.tokens):
                        yield -float(log_softmax(logits)[0, window.tokens[kv.length]])
            passed(len(live))


@contextmanager
def lanes(engine: Engine, kv: KVCache, windows: Sequence[Window], chunk: int) -> Iterator[Lanes]:
    """Allocates KV cache for the windows within the block. Raises RequestError where too few tokens are
    free."""
    held: list[tuple[Window, SequenceKV]] = []
    try:
        for window in windows:
            held.append((window, kv.allocate(len(window.tokens))))
            held[-1][1].select_rope(len(window.tokens))
        yield Lanes(engine, held, chunk)
    finally:
        for _, sequence in held:
            kv.release(sequence)


@contextmanager
def separate_counters(engine: Engine) -> Iterator[None]:
    """Keep the block's steps out of the engine's counters and away from its observers."""
    counters, observers = engine.counters, engine.observers
    engine.counters = Counters(engine.layout.tile_bytes, engine.shape.layers)
    engine.observers = []
    try:
        yield
    finally:
        engine.counters, engine.observers = counters, observers


@contextmanager
def observed(engine: Engine, observer: Observer) -> Iterator[None]:
    engine.observers.append(observer)
    try:
        yield
    finally:
        engine.observers.remove(observer)
