"""Exact speculation: how many guesses of next tokens (`drafts.py`) a decode step computes beside the tokens
that are certain. A guess's logits are used only where the token before was chosen as guessed, so no token
depends on guesses.

A step with guesses touches more experts and takes longer, so each is chosen for the most expected tokens a
second: the chances that guesses come true, over the seconds that such steps have taken. What has not been
measured is foretold from fewer guesses, by the experts that tokens of a step share. Without a clear gain a
step has no guesses. Used by the engine's thread alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import FEW_ROWS
from pipeline.config import SpeculateName
from pipeline.counters import Part, PhaseCounters
from pipeline.engine.engine import Engine
from pipeline.policies.view import Policy
from pipeline.scheduling.drafts import LEAST_CHANCE
from pipeline.scheduling.jobs import Job

MOST = FEW_ROWS - 1  # guesses of a step
GAIN = 1.06  # in tokens a second, without which a step has no guesses
OVERLAP = 0.82  # n tokens touch n ** OVERLAP times the experts of one (1.8, 2.5, 3.1), unless measured
RECENT, ENOUGH = 15, 3  # steps of a kind whose median counts, and from which on it does
REFRESHED = 32  # steps with guesses after which one without is measured again
FORGOTTEN = 1024  # steps after which what a kind of step took is foretold again
EXPERTS: tuple[Part, ...] = ("submit", "device", "link", "disk", "wait")  # parts that grow with the experts


class _Kind:
    """Steps of one kind, of which the median counts: on a busy machine single ones may take far longer."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.typical, self.last = 0.0, 0  # the median; the number of the latest step

    @property
    def known(self) -> bool:
        return len(self._recent) >= ENOUGH

    def note(self, value: float, step: int) -> None:
        if step - self.last > FORGOTTEN:
            self._recent.clear()
        self._recent.append(value)
        self.typical, self.last = median(self._recent), step


class StepCosts:
    """What steps take, by their sequences and guesses: seconds without guesses; with 1, with 2 or 3, with 4
    to 7, and with more of them the share of those seconds that each guess adds."""

    def __init__(self) -> None:
        self._bases: dict[int, _Kind] = {}  # by sequences
        self._adds: dict[tuple[int, int], _Kind] = {}  # by sequences and the bits of the number of guesses
        self._steps = 0
        self._drafted: dict[int, int] = {}  # by sequences: steps with guesses since one without
        self.overlap = OVERLAP
        self.share = 1.0  # of a step without guesses, that grows with the experts

    def note(self, sequences: int, guesses: int, seconds: float) -> None:
        """A step has been computed."""
        self._steps += 1
        base = self._bases.setdefault(sequences, _Kind())
        if not guesses:
            self._drafted[sequences] = 0
            base.note(seconds, self._steps)
            return
        self._drafted[sequences] = self._drafted.get(sequences, 0) + 1
        if base.typical:
            added = (seconds / base.typical - 1) / guesses
            self._adds.setdefault((sequences, guesses.bit_length()), _Kind()).note(added, self._steps)

    def base(self, sequences: int) -> float:
        """Returns the seconds of a step without guesses; 0 where none was."""
        return self._bases[sequences].typical if sequences in self._bases else 0.0

    def stale(self, sequences: int) -> bool:
        """Returns whether the next step should have no guesses, to be measured."""
        base = self._bases.get(sequences)
        return base is None or not base.known or self._drafted[sequences] >= REFRESHED

    def multiples(self, sequences: int, most: int) -> list[float]:
        """Returns what steps of 0..most guesses take, as multiples of one without."""
        multiples = [1.0]
        measured = 1.0  # over foretold, of the nearest measured ones below
        for guesses in range(1, most + 1):
            foretold = self._foretold(sequences, guesses)
            kind = self._adds.get((sequences, guesses.bit_length()))
            if kind is not None and kind.known and self._steps - kind.last <= FORGOTTEN:
                measured = (1 + guesses * kind.typical) / foretold
            multiples.append(max(foretold * measured, multiples[-1]))
        return multiples

    def _foretold(self, sequences: int, guesses: int) -> float:
        more: float = (1 + guesses / sequences) ** self.overlap
        return 1 - self.share + self.share * more

    def report(self) -> dict[str, float]:
        """Returns what a guess adds to a step as measured, by sequences and the least guesses of its kind."""
        kinds = sorted(self._adds.items())
        return {f"{s}+{1 << bits >> 1}": kind.typical for (s, bits), kind in kinds if kind.known}


def best_numbers(chances: Sequence[Sequence[float]], costs: StepCosts, most: int) -> list[int]:
    """Returns how many guesses of each sequence, `most` in all, give the most expected tokens a second.
    `chances`: as of Draft; a sequence's own fall, so that none is taken without those before it."""
    each = ((chance, -at, n) for n, row in enumerate(chances) for at, chance in enumerate(row))
    falling = sorted((one for one in each if one[0] >= LEAST_CHANCE), reverse=True)[:most]
    sequences = len(chances)
    multiples = costs.multiples(sequences, len(falling))
    expected, best, taken = float(sequences), sequences * GAIN, 0
    for guesses, (chance, _, _) in enumerate(falling, 1):
        expected += chance
        if expected / multiples[guesses] > best:
            best, taken = expected / multiples[guesses], guesses
    numbers = [0] * sequences
    for _, _, n in falling[:taken]:
        numbers[n] += 1
    return numbers


class Speculation:
    """Plans the guesses of each decode step."""

    def __init__(self, engine: Engine, kv: KVCache, wish: SpeculateName | int) -> None:
        """`wish`: as in EngineConfig."""
        self._engine, self._wish = engine, wish
        self._off = ""  # why there are never any
        if wish == "off":
            self._off = "--speculate off"
        elif kv.snapshots is not None:
            self._off = "the model has recurrent states, which cannot go back"
        elif not engine.backbone.chunks:
            self._off = "the model's sequences cannot be computed in parts"
        self._policy: Policy | None = None  # which the costs are of
        self.costs = StepCosts()
        self._steps = self._drafted = self._accepted = 0
        self._more_seconds = 0.0  # of steps with guesses, than without
        self._experts: dict[int, float] = {}  # of a step by its rows, a mean
        self._before = 0, 0  # decode steps and the experts they used, at the latest step

    @property
    def off(self) -> str:
        """Returns why steps have no guesses; "" where they may have."""
        policy = self._engine.policy
        if self._off or policy.by_row:
            return self._off
        return f"under {policy.name} a token depends on the others of its step"

    def plan(self, jobs: Sequence[Job]) -> None:
        """Set the guesses of each job for its next step."""
        for job in jobs:
            job.guesses, job.guesser.ahead = [], 0
        if self.off or not 0 < len(jobs) <= MOST:
            return
        if self._policy is not self._engine.policy:
            self._policy, self.costs = self._engine.policy, StepCosts()
        most = MOST + 1 - len(jobs)
        step = self.costs.base(len(jobs)) / len(jobs)
        for job in jobs:
            job.guesser.ahead = most
            job.guesser.wait(step)
        if isinstance(self._wish, int):
            fixed = min(self._wish, most // len(jobs))
            for job in jobs:
                job.guesses = job.guesser.next(fixed)[0]
            return
        drafts = [job.guesser.next(most) for job in jobs]
        if not any(chances and chances[0] >= LEAST_CHANCE for _, chances in drafts):
            return
        if self.costs.stale(len(jobs)):
            return
        numbers = best_numbers([chances for _, chances in drafts], self.costs, most)
        for job, (guesses, _), number in zip(jobs, drafts, numbers, strict=True):
            job.guesses = guesses[:number]

    def note(self, jobs: Sequence[Job], guesses: int, accepted: int, seconds: float) -> None:
        """A decode step of these jobs has been computed."""
        sequences, counters = len(jobs), self._engine.counters.phases["decode"]
        if any(job.counted for job in jobs):
            counters.rows += accepted
        if guesses:
            self._steps += 1
            self._drafted += guesses
            self._accepted += accepted
            self._more_seconds += seconds - (self.costs.base(sequences) or seconds)
        self.costs.note(sequences, guesses, seconds)
        self._note_experts(counters, sequences + guesses, guesses > 0)

    def _note_experts(self, counters: PhaseCounters, rows: int, drafted: bool) -> None:
        """Learn what share of a step grows with its experts, and how many of them its rows share."""
        steps, used = counters.steps, int(counters.active.sum())
        before, self._before = self._before, (steps, used)
        if steps != before[0] + 1:  # other steps were between
            return
        experts = used - before[1]
        self._experts[rows] = self._experts.get(rows, experts) * 0.9 + experts * 0.1
        one = self._experts.get(1)
        if drafted and one:
            shown = math.log(max(self._experts[rows] / one, 1.0)) / math.log(rows)
            self.costs.overlap += (min(shown, 1.0) - self.costs.overlap) / RECENT
        if steps % REFRESHED == 0:
            self.costs.share = _share(counters)

    def stats(self) -> dict[str, Any]:
        """Returns what was guessed, what of it came true, and what it cost. Any thread may ask."""
        return {
            "wish": self._wish,
            "off": self.off,
            "steps": self._steps,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "more_seconds": self._more_seconds,
            "overlap": self.costs.overlap,
            "added": self.costs.report(),
        }


def _share(counters: PhaseCounters) -> float:
    """Returns the share of decode steps' time that grows with the experts."""
    whole = sum(map(sum, counters.seconds.values()))
    return sum(sum(counters.seconds[part]) for part in EXPERTS) / whole if whole else 1.0
