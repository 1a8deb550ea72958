"""A calibration's text, divided into windows, and read with the engine; what a calibration is given, and what
it finds beside its arrays.

The first part of each window is read as a prompt, the rest is decoded, one token of each window a step; every
fifth is held out for validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache, SequenceKV, States
from pipeline.calibration import HELD_OUT, LANES, LEAST_TOKENS
from pipeline.calibration.observers import Up
from pipeline.counters import Counters
from pipeline.engine.engine import Engine
from pipeline.errors import RequestError
from pipeline.text.logprobs import log_softmax
from shm.store import Store

Progress = Callable[[str, int, int], None]  # stage, done, total; its exceptions end the calibration
Passed = Callable[[int], None]  # takes the number of tokens just read; its exceptions end the reading

LARGEST_WINDOW = 512  # tokens
SMALL_WINDOW = 64  # tokens; windows get this small where that makes 5 * LANES of them
LEAST_CONTEXT = 16  # tokens, for windows with a prompt and an answer
# The share of a window that is read as a prompt; the rest is decoded. Validation windows decode more, because
# the threshold is searched on that.
TRAINING_PROMPT, VALIDATION_PROMPT = 0.75, 0.5


@dataclass(frozen=True)
class Window:
    """Consecutive tokens that are read as a sequence of their own; the first `prefill` are the prompt."""

    tokens: list[int]
    prefill: int


@dataclass(frozen=True)
class Division:
    """The windows of the two parts of a text, each in the order of the text."""

    training: list[Window]
    validation: list[Window]

    @classmethod
    def of(cls, tokens: Sequence[int], context: int, most: int) -> Division:
        """Cut windows of about equal length that fit the context, at most `most` tokens in all. Those of a
        longer text are evenly spaced over all of it. Raises RequestError for too short a text or context."""
        if min(len(tokens), most) < LEAST_TOKENS:
            raise RequestError(
                f"the text has {len(tokens)} tokens, calibrating needs {LEAST_TOKENS} and gets better with"
                " thousands; give a longer one"
            )
        if context < LEAST_CONTEXT:
            raise RequestError(
                f"the context is {context} tokens, calibrating needs {LEAST_CONTEXT}; start the engine with a"
                " larger --context"
            )
        windows = _windows(tokens, min(len(tokens), most), min(LARGEST_WINDOW, context))
        middle = HELD_OUT // 2
        held_out = set(range(middle, len(windows), HELD_OUT))
        return cls(
            [_window(w, TRAINING_PROMPT) for i, w in enumerate(windows) if i not in held_out],
            [_window(windows[i], VALIDATION_PROMPT) for i in sorted(held_out)],
        )

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(len(window.tokens) for window in self.training + self.validation)


def _windows(tokens: Sequence[int], wanted: int, largest: int) -> list[list[int]]:
    """Returns `wanted` tokens in windows of up to `largest`, evenly spaced over all of the text."""
    count = max(-(-wanted // largest), min(HELD_OUT * LANES, wanted // SMALL_WINDOW))
    windows = []
    for window in range(count):
        start = len(tokens) * window // count
        size = wanted * (window + 1) // count - wanted * window // count
        windows.append(list(tokens[start : start + size]))
    return windows


def _window(tokens: list[int], prompt: float) -> Window:
    return Window(tokens, int(len(tokens) * prompt))


@dataclass(frozen=True)
class CalibrationContext:
    """The parts of an engine that a calibration uses. `chunk`: prefill tokens of a step; `lanes`: sequences
    that are decoded together at most; `up`: u = up x of an expert, where the format keeps the up matrices
    apart; `max_loss`: percent that an approximation may add to the perplexity, if that is bounded."""

    engine: Engine
    store: Store
    kv: KVCache
    chunk: int
    lanes: int
    context: int
    seed: int
    up: Up | None = None
    max_loss: float | None = None


@dataclass
class Findings:
    """Results of a calibration other than its arrays."""

    tokens: int = 0  # that were read
    notes: list[str] = field(default_factory=list)  # what could not be measured, with the remedy
    losses: dict[str, float] = field(default_factory=dict)  # nats a token: "exact", "gated" at the threshold
    sparsities: list[list[float]] = field(default_factory=list)  # tried: share of the channels, perplexity


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
        self._begun: list[States] = []  # where the answers begin

    def read_prompts(self, passed: Passed) -> None:
        """Read the prompts by prefill, each at most `chunk` tokens a step."""
        for window, kv in self._held:
            while kv.length < window.prefill:
                tokens = window.tokens[kv.length : min(kv.length + self._chunk, window.prefill)]
                self._engine.step([StepInput(TokenSpan(kv, tokens), "none")], "prefill")
                passed(len(tokens))
            self._begun.append(kv.copied_states())

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
        for (window, kv), begun in zip(self._held, self._begun, strict=True):
            kv.truncate(window.prefill, begun)
            kv.grow(len(window.tokens))
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
    """Give the engine fresh counters and no observers for the block, which may set its own; the engine's
    come back at its end."""
    counters, observers = engine.counters, engine.observers
    engine.counters = Counters(engine.layout.tile_bytes, engine.shape.layers)
    engine.observers = []
    try:
        yield
    finally:
        engine.counters, engine.observers = counters, observers
