"""Guesses by the layer of a checkpoint that drafts (`pipeline/engine/drafter.py`), for any of a job's next
tokens, whether its text repeats or not.

The layer runs only where its guesses are wanted. Until then a job keeps the hidden states of its latest
tokens, with which the layer catches up, or begins anew where older ones are lost: behind a prefix that
another request has computed, after a preemption, or when its keys and values are full. Then guesses are worse
for a while, and no token depends on that. How often guesses come true is counted for all jobs together, by
their depth."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.backbone.linear import FEW_ROWS
from pipeline.config import DRAFT_TOKENS, KV_BLOCK
from pipeline.engine.drafter import Drafter
from pipeline.errors import NotFinite, PipelineError
from pipeline.scheduling.jobs import Job

log = logging.getLogger(__name__)

DEPTHS = 4  # guesses one behind the other
# A first guess is thought so good, as if by so many judgements, and a deeper one as the one before it.
FIRST_GUESS, WEIGHT = 0.6, 4.0
FADING = 0.95  # of earlier judgements, with each new one
ENOUGH = 8  # judgements, before which no step computes a guess
# Steps after which one guess is made to be judged; twice as many each time that this led to no others.
TRIED, LONGEST = 32, 1024


class Tail:
    """The latest hidden states of a job, and the sequence of the layer that has seen some of them."""

    def __init__(self, recent: int) -> None:
        """`recent`: states that are kept, at least, once there were so many."""
        self._recent = recent
        self._rows: deque[tuple[int, Tensor]] = deque()  # (position of the first, states), one behind another
        self.end = 0  # position behind the last
        self.done = 0  # position up to which the layer has seen them
        self.kv: SequenceKV | None = None

    def add(self, first: int, hidden: Tensor) -> None:
        """Keep states of tokens from position `first` on."""
        if first != self.end:
            self._rows.clear()
        self.end = first + len(hidden)
        kept = hidden[-self._recent :].clone()  # not the memory of a whole chunk
        self._rows.append((self.end - len(kept), kept))
        while len(self._rows) > 1 and self.end - self._rows[1][0] >= self._recent:
            self._rows.popleft()

    def since(self, first: int) -> Tensor:
        """Returns the states from a position on that are kept."""
        return torch.cat([states[max(0, first - start) :] for start, states in self._rows])

    def begin(self, kv: SequenceKV, further: int) -> None:
        """Have the layer's sequence lack at most `recent` states, with room for so many more tokens."""
        self.kv, first = kv, max(self._rows[0][0], self.end - self._recent)
        new = self.end - self.done + further
        if first <= self.done <= self.end and kv.length + new <= DRAFT_TOKENS:
            return
        self.cut(0)
        self.done = first

    def cut(self, length: int) -> None:
        """Keep so many tokens of the layer's sequence."""
        assert self.kv is not None
        self.kv.truncate(length)
        self.kv.grow(DRAFT_TOKENS)


class LayerDrafts:
    """Makes and judges the guesses of all jobs. Used by the engine's thread alone."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._tails: dict[Job, Tail] = {}
        self._guessed: dict[Job, tuple[int, list[int]]] = {}  # to be judged: tokens then, and guesses behind
        self._right, self._judged = [0.0] * DEPTHS, [0.0] * DEPTHS
        self._idle, self._pause = 0, TRIED  # steps since the layer has run, and until it is tried
        self.seconds, self.steps = 0.0, 0  # of the layer
        self.failed = ""  # why it does not run any more

    def keep(self, job: Job, first: int, hidden: Tensor) -> None:
        """Take the hidden states of a job's tokens from position `first` on."""
        if not len(hidden):
            return
        if job not in self._tails:  # perhaps of another kind than those before
            self._tails[job], self._pause = Tail(self._drafter.recent), TRIED
        self._tails[job].add(first, hidden)

    def forget(self, job: Job) -> None:
        """A job has ended, or has lost its sequence."""
        self._guessed.pop(job, None)
        tail = self._tails.pop(job, None)
        if tail is not None and tail.kv is not None:
            self._drafter.kv.release(tail.kv)

    def knows(self, job: Job) -> bool:
        """Returns whether there may be guesses of the job's next tokens."""
        tail = self._tails.get(job)
        if self.failed or tail is None or tail.end != len(job.tokens) - 1:
            return False
        return tail.kv is not None or self._room

    def chances(self, most: int) -> list[float]:
        """Returns for each of at most so many guesses of a job how probable it is that it and all before it
        are right."""
        rates, rate = [], FIRST_GUESS
        for right, judged in zip(self._right, self._judged, strict=True):
            rate = (right + WEIGHT * rate) / (judged + WEIGHT)
            rates.append(rate)
        return list(accumulate(rates[:most], mul))

    @property
    def tried(self) -> bool:
        """Returns whether enough guesses were judged for a step to compute some."""
        return self._judged[0] >= ENOUGH

    @property
    def _room(self) -> bool:
        """Whether another job may have a sequence of the layer."""
        return KV_BLOCK * self._drafter.kv.free >= DRAFT_TOKENS

    @property
    def due(self) -> bool:
        """Returns whether a guess should be made only to be judged."""
        return not self.tried or self._idle >= self._pause

    def judge(self) -> None:
        """A step has been computed: judge what was guessed of its tokens."""
        self._idle += 1
        for job, (at, guesses) in self._guessed.items():
            for depth, (guess, token) in enumerate(zip(guesses, job.tokens[at:], strict=False)):
                self._right[depth] = self._right[depth] * FADING + (guess == token)
                self._judged[depth] = self._judged[depth] * FADING + 1
                if guess != token:
                    break
        self._guessed.clear()

    def try_one(self, job: Job) -> None:
        """Make a guess of a job's next token only to be judged."""
        pause = self._pause
        self.draft({job: 1})
        self._pause = min(2 * pause, LONGEST)

    def draft(self, numbers: dict[Job, int]) -> dict[Job, list[int]]:
        """Returns so many guesses of each of these jobs, which it knows; none where the layer has no room."""
        began, self._pause = time.perf_counter(), TRIED
        self._idle = 0
        try:
            tails = {job: tail for job, n in numbers.items() if (tail := self._begun(job, n)) is not None}
            guesses = self._guesses(tails, numbers) if tails else {}
        except NotFinite:  # of one of them, which its own step will find
            for job in numbers:
                self.forget(job)
            return {}
        except PipelineError as e:
            log.warning("the layer that drafts guesses no more: %s", e)
            self.failed = str(e)
            for job in list(self._tails):
                self.forget(job)
            return {}
        finally:
            self.seconds += time.perf_counter() - began
        self._guessed = {job: (len(job.tokens), made) for job, made in guesses.items()}
        return guesses

    def _begun(self, job: Job, number: int) -> Tail | None:
        """Returns a job's tail with a sequence of the layer; None where there is no room for another."""
        tail, cache = self._tails[job], self._drafter.kv
        kv = tail.kv
        if kv is None and not self._room:
            return None
        tail.begin(kv or cache.allocate(DRAFT_TOKENS), number)
        return tail

    def _guesses(self, tails: dict[Job, Tail], numbers: dict[Job, int]) -> dict[Job, list[int]]:
        pending = {job: tail.end - tail.done for job, tail in tails.items()}
        while sum(pending.values()) > FEW_ROWS:  # catch up, one by one
            job = max(pending, key=lambda job: pending[job])
            self._run([job], tails, pending[job] - 1)
            pending[job] = 1
        guesses: dict[Job, list[int]] = {job: [] for job in tails}
        jobs = list(tails)
        tokens, hidden = self._run(jobs, tails)
        certain = {job: kv.length for job, tail in tails.items() if (kv := tail.kv) is not None}
        while True:
            for job, token in zip(jobs, tokens, strict=True):
                guesses[job].append(token)
            on = [n for n, job in enumerate(jobs) if len(guesses[job]) < numbers[job]]
            if not on:
                break
            jobs, hidden = [jobs[n] for n in on], hidden[on]
            spans = [TokenSpan(_kv(tails[job]), guesses[job][-1:]) for job in jobs]
            tokens, hidden = self._step(spans, hidden)
        for job, length in certain.items():
            tails[job].cut(length)
        return guesses

    def _run(
        self, jobs: Sequence[Job], tails: dict[Job, Tail], most: int | None = None
    ) -> tuple[list[int], Tensor]:
        """Run what the layer has not seen of these jobs, at most so many tokens of each."""
        spans, states = [], []
        for job in jobs:
            tail = tails[job]
            hidden = tail.since(tail.done)[:most]
            tokens = job.tokens[tail.done + 1 : tail.done + 1 + len(hidden)]
            spans.append(TokenSpan(_kv(tail), tokens))
            states.append(hidden)
            tail.done += len(hidden)
        return self._step(spans, torch.cat(states))

    def _step(self, spans: Sequence[TokenSpan], hidden: Tensor) -> tuple[list[int], Tensor]:
        self.steps += 1
        return self._drafter.step(spans, hidden)


def _kv(tail: Tail) -> SequenceKV:
    assert tail.kv is not None
    return tail.kv
