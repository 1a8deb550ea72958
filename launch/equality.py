"""The one rule of equality between two answers to the same prompt (docs/architecture.md, Equality).

Between plans, batch compositions and worker counts results differ by rounding only. So greedy tokens are
equal, or their first difference is at a near-tie: by the reference's own log-probabilities the token there is
within the rounding bound of the best, whatever its rank. What follows a first difference has another past and
is not compared.

At each step a reference measures one other token, its runner-up; run again with a third token as the
Generate's `rival` it measures that one. Where rounding flips a router's choice, log-probabilities move by
more than the bound, and a reference has several values of its own: `stress/load.py` runs it again with
the same past divided otherwise into prefill and decode; in one of them the token must be within the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from protocol.messages import Token

# Nats that rounding alone may move the margin between two tokens by. Float32: as wide as the tests' bound
# against another implementation; the shipped script's answers under load and alone did not differ at all.
F32_BOUND = 1e-4
# With bfloat16 in the experts or in the rest. On the embedded model, 21,728 steps under load moved margins by
# 0.005 on average, and by up to 0.5625 where rounding flipped a router's choice; the median margin is 1.1.
BF16_BOUND = 0.5
# With activations rounded to int8 a difference of rounding moves some codes by a whole step: 4,415 steps in
# int4 by 0.006 on average, by up to 0.49; one of 110 answers of the shipped script by 0.97 or more.
QUANTIZED_BOUND = 1.0


@dataclass(frozen=True)
class Step:
    """One step of the reference that is no message: its token, the one that was measured against it (the
    second best, or the Generate's `rival`), and by how many nats the best is more likely, 0 or more."""

    token: int
    runner_up: int
    margin: float


class Verdict(StrEnum):
    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class Comparison:
    """The verdict, and where the first difference is: `ours` and `expected` are None where that sequence has
    ended. `margin`: by how many nats the reference prefers its best token to ours; None where it did not
    measure ours, which is a mismatch until it does."""

    verdict: Verdict
    at: int | None = None
    ours: int | None = None
    expected: int | None = None
    margin: float | None = None


def compare(tokens: Sequence[int], reference: Sequence[Token | Step], bound: float) -> Comparison:
    """Apply the rule. An end token is a step like any other."""
    for at, (ours, choice) in enumerate(zip_longest(tokens, reference)):
        if choice is None:
            return Comparison(Verdict.MISMATCH, at, ours)
        if ours != choice.token:
            margin = choice.margin if ours == choice.runner_up else None
            near = margin is not None and margin < bound
            verdict = Verdict.NEAR_TIE if near else Verdict.MISMATCH
            return Comparison(verdict, at, ours, choice.token, margin)
    return Comparison(Verdict.EQUAL)


def rounding_bound(*formats: str) -> float:
    """Nats by which rounding alone may move a margin, by the formats of the experts, the backbone and the KV
    cache."""
    if {*formats} == {"f32"}:
        return F32_BOUND
    return BF16_BOUND if {*formats} <= {"f32", "bf16"} else QUANTIZED_BOUND
