"""The table of a stress run: what it counts, when it says a line, and its verdict."""

from __future__ import annotations

from typing import Any

from launch.stress.report import ERRORS, report_parts
from launch.terminal.tables import render

TIMES = {"p50": 0.0101, "p95": 0.0202, "p99": None, "max": 0.5}


def found(**changed: Any) -> dict[str, Any]:
    """The report of a run that passed: 12 requests."""
    errors: dict[str, Any] = dict.fromkeys(ERRORS, 0)
    report = errors | {
        "passed": True,
        "finished": True,
        "policy": "fiddler",
        "device": "cpu",
        "format": "int4",
        "backbone_dtype": "bf16",
        "emulation": "",
        "clients": 3,
        "requests": 12,
        "unsent": 0,
        "completed": 9,
        "cancelled": 2,
        "refused": 0,
        "compared": 8,
        "equal": 8,
        "near_ties": 0,
        "near_tie_bound": 0.05,
        "seconds": 2.04,
        "tokens": 100,
        "tok_s": 49.0,
        "first_token_s": TIMES,
        "token_gap_s": TIMES | {"p50": None},
        "jain": 0.98765,
        "kv_reused_tokens": 0,
        "preemptions": 0,
        "chaos": None,
        "leaks_checked": True,
        "details": {kind: [] for kind in ("near_ties", *ERRORS)},
    }
    return report | changed


SNAPSHOT = """\
12 requests by 3 clients in 2.0 s, 100 tokens, 49 tok/s
fiddler on cpu, experts int4, backbone bf16

requests  9 completed, 2 cancelled, 0 refused, 0 unsent
alone     8 compared, 8 equal, 0 near-ties
errors    0 mismatches, 0 failures, 0 lost answers, 0 duplicates, 0 leaks, 0 not
          recovered

milliseconds         p50   p95  p99    max
to the first token  10.1  20.2    -  500.0
between tokens         -  20.2    -  500.0

Jain's fairness index of the clients' tok/s, queueing included: 0.988

passed: 8 answers compared with the same request run alone
"""


def shown(**changed: Any) -> str:
    return render(*report_parts(found(**changed)))


def test_run_that_passed() -> None:
    assert shown() == SNAPSHOT
