"""What `bench` measured under one policy, and the figures derived from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from launch.bench.perplexity import Perplexity
from launch.bench.run import Run
from launch.phase_profile import PhaseProfile, added
from pipeline.policies.view import PolicyRequest


@dataclass
class PolicyResult:
    """One policy's runs, in the order of the rounds."""

    request: PolicyRequest
    exact: bool = True
    notes: list[str] = field(default_factory=list)  # from the engine, without repetitions
    runs: list[Run] = field(default_factory=list)
    perplexity: Perplexity | None = None  # of an approximate policy
    left_out: str = ""  # why the policy cannot run here

    def ratio(self, first: PolicyResult, figure: str) -> float:
        """The median of the rounds' ratios to the first policy. A round's runs are neighbours in time, so
        a drift of the machine's speed weighs less in it than in the ratio of two medians."""
        pairs = zip(self.figures(figure), first.figures(figure), strict=True)
        return median(mine / its for mine, its in pairs)

    def figures(self, name: str) -> list[float]:
        """A field of Run, in the order of the rounds."""
        return [float(getattr(run, name)) for run in self.runs]

    @property
    def placed_bytes(self) -> float:
        """Bytes a token that placement and replacement copied in the background: the rounds' median."""
        return median(self.figures("placed_bytes_per_token"))

    def decode(self, tile_bytes: int) -> PhaseProfile:
        """The engine's counters of decode, summed over the rounds."""
        return PhaseProfile(added(run.decode for run in self.runs), tile_bytes)


def merged_notes(noted: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """`noted`: each policy's name and notes. A note that differs only in the policy's name before it comes
    once, after the names of all its policies."""
    names: dict[tuple[bool, str], list[str]] = {}
    for name, notes in noted:
        for note in notes:
            text = note.removeprefix(f"{name}: ")
            names.setdefault((text != note, text), []).append(name)
    return [", ".join(of) + f": {text}" if named else text for (named, text), of in names.items()]
