"""Exact speculation: how many guesses of next tokens a decode step computes beside the tokens that are
certain. They are a text's own repetitions (`drafts.py`), or those of the checkpoint's layer that drafts
(`layer_drafts.py`), whichever are surer of the next token. A guess's logits are used only where the token
before was chosen as guessed, so no token depends on guesses.

A step with guesses touches more experts and takes longer, so each is chosen for the most expected tokens a
second: the chances that guesses come true, over the seconds that such steps have taken. What has not been
measured is foretold from fewer guesses, by the experts that tokens of a step share. What the layer takes for
each of its guesses counts too. Without a clear gain a step has no guesses. Used by the engine's thread
alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch import Tensor

from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import FEW_ROWS
from pipeline.config import SpeculateName
from pipeline.counters import Part, PhaseCounters
from pipeline.engine.drafter import Drafter
from pipeline.engine.engine import Engine
from pipeline.policies.view import Policy
from pipeline.scheduling.drafts import LEAST_CHANCE
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.layer_drafts import LayerDrafts

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


def best_numbers(
    chances: Sequence[Sequence[float]], costs: StepCosts, most: int, making: Sequence[float] = ()
) -> list[int]:
    """Returns how many guesses of each sequence, `most` in all, give the most expected tokens a second.
    `chances`: as of Draft; a sequence's own fall, so that none is taken without those before it. `making`:
    what it takes to make one guess of each sequence, as a multiple of a step without guesses."""
    each = ((chance, -at, n) for n, row in enumerate(chances) for at, chance in enumerate(row))
    falling = sorted((one for one in each if one[0] >= LEAST_CHANCE), reverse=True)[:most]
    sequences = len(chances)
    multiples = costs.multiples(sequences, len(falling))
    expected, best, taken, made = float(sequences), sequences * GAIN, 0, 0.0
    for guesses, (chance, _, n) in enumerate(falling, 1):
        expected += chance
        made += making[n] if making else 0.0
        if expected / (multiples[guesses] + made) > best:
            best, taken = expected / (multiples[guesses] + made), guesses
    numbers = [0] * sequences
    for _, _, n in falling[:taken]:
        numbers[n] += 1
    return numbers


@dataclass
class Source:
    """What one kind of guesses came to."""

    drafted: int = 0
    accepted: int = 0
    more_seconds: float = 0.0  # of steps with guesses, than without


class Speculation:
    """Plans the guesses of each decode step."""

    def __init__(
        self, engine: Engine, kv: KVCache, wish: SpeculateName | int, drafter: Drafter | None = None
    ) -> None:
        """`wish`: as in EngineConfig; `drafter`: of a model with a layer that drafts."""
        self._engine, self._wish = engine, wish
        self._off = ""  # why there are never any
        if wish == "off":
            self._off = "--speculate off"
        elif kv.snapshots is not None:
            self._off = "the model has recurrent states, which cannot go back"
        elif not engine.backbone.chunks:
            self._off = "the model's sequences cannot be computed in parts"
        self._layer = None if drafter is None or self._off else LayerDrafts(drafter)
        self._making = _Kind()  # seconds for each guess of the layer
        self.drafting = 0.0  # seconds that the guesses of the next step have taken to make
        self._by_layer: set[Job] = set()  # whose guesses for the next step are the layer's
        self.sources = {kind: Source() for kind in (["n-gram"] if self._layer is None else ["n-gram", "mtp"])}
        self._policy: Policy | None = None  # which the costs are of
        self.costs = StepCosts()
        self._steps = 0  # with guesses
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
        self.drafting = 0.0
        self._by_layer.clear()
        for job in jobs:
            job.guesses, job.guesser.ahead = [], 0
        if self.off or not 0 < len(jobs) <= MOST:
            return
        if self._policy is not self._engine.policy:
            self._policy, self.costs, self._making = self._engine.policy, StepCosts(), _Kind()
        most = MOST + 1 - len(jobs)
        step = self.costs.base(len(jobs)) / len(jobs)
        for job in jobs:
            job.guesser.ahead = most
            job.guesser.wait(step)
        drafts = [job.guesser.next(most) for job in jobs]
        chances = [self._surer(job, own, most) for job, (_, own) in zip(jobs, drafts, strict=True)]
        numbers = self._numbers(jobs, chances, most)
        for job, (guesses, _), number in zip(jobs, drafts, numbers, strict=True):
            if job not in self._by_layer:
                job.guesses = guesses[:number]
        self._make(dict(zip(jobs, numbers, strict=True)))

    def _surer(self, job: Job, chances: list[float], most: int) -> list[float]:
        """Returns the chances of the guesses of a job that are surer of the next token."""
        if self._layer is None or job.guesser.bound or not self._layer.knows(job):
            return chances
        others = self._layer.chances(job.guesser.room(most))
        if not others or (chances and chances[0] >= others[0]):
            return chances
        self._by_layer.add(job)
        return others

    def _numbers(self, jobs: Sequence[Job], chances: Sequence[Sequence[float]], most: int) -> list[int]:
        """Returns how many guesses of each job the next step computes."""
        if isinstance(self._wish, int):
            return [min(self._wish, most // len(jobs), len(row)) for row in chances]
        likely = any(row and row[0] >= LEAST_CHANCE for row in chances)
        if not likely or self.costs.stale(len(jobs)):
            return [0] * len(jobs)
        if self._by_layer and self._layer is not None and not self._layer.tried:
            chances = [() if job in self._by_layer else row for job, row in zip(jobs, chances, strict=True)]
        each = self._making.typical / self.costs.base(len(jobs))
        making = [each * (job in self._by_layer) for job in jobs]
        return best_numbers(chances, self.costs, most, making)

    def _make(self, numbers: dict[Job, int]) -> None:
        """Have the layer make its guesses: so many, or now and then one to be judged."""
        if self._layer is None or not self._by_layer:
            return
        wanted = {job: n for job, n in numbers.items() if n and job in self._by_layer}
        steps, seconds = self._layer.steps, self._layer.seconds
        if wanted:
            made = self._layer.draft(wanted)
            for job in wanted:
                job.guesses = made.get(job, [])
        elif self._layer.due:
            self._layer.try_one(next(iter(self._by_layer)))
        else:
            return
        self.drafting = self._layer.seconds - seconds
        self._making.note(self.drafting / max(1, self._layer.steps - steps), self._layer.steps)

    def keep(self, job: Job, first: int, hidden: Tensor) -> None:
        """A step has computed a job's tokens from position `first` on, of which these hidden states are
        certain."""
        if self._layer is not None and job.grows and not job.guesser.bound and not self.off:
            self._layer.keep(job, first, hidden)

    def forget(self, job: Job) -> None:
        """A job has ended, or has lost its sequence."""
        if self._layer is not None:
            self._layer.forget(job)

    def note(
        self, jobs: Sequence[Job], guesses: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """A decode step of these jobs has been computed, with so many guesses of each, of which so many came
        true."""
        sequences, counters = len(jobs), self._engine.counters.phases["decode"]
        if any(job.counted for job in jobs):
            counters.rows += sum(accepted)
        more = seconds - (self.costs.base(sequences) or seconds)
        every = sum(guesses)
        self._steps += every > 0
        for job, drafted, true in zip(jobs, guesses, accepted, strict=True):
            source = self.sources["mtp" if job in self._by_layer else "n-gram"]
            source.drafted += drafted
            source.accepted += true
            source.more_seconds += more * drafted / max(1, every)
        if self._layer is not None:
            self.sources["mtp"].more_seconds += self.drafting
            self._layer.judge()
        self.costs.note(sequences, every, seconds)
        self._note_experts(counters, sequences + every, every > 0)

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
        sources = {name: asdict(source) for name, source in self.sources.items()}
        return {
            "wish": self._wish,
            "off": self.off,
            "steps": self._steps,
            **{key: sum(source[key] for source in sources.values()) for key in asdict(Source())},
            "sources": sources,
            "overlap": self.costs.overlap,
            "added": self.costs.report(),
        }


def _share(counters: PhaseCounters) -> float:
    """Returns the share of decode steps' time that grows with the experts."""
    whole = sum(map(sum, counters.seconds.values()))
    return sum(sum(counters.seconds[part]) for part in EXPERTS) / whole if whole else 1.0
