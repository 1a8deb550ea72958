"""The table of a stress run: what it counts, when it says a line, and its verdict."""

from __future__ import annotations

from typing import Any

import pytest

from launch.stress.report import ERRORS, MOST_CLIENTS, MOST_DETAILS, report_parts
from launch.terminal.format import MISSING
from launch.terminal.tables import render

TIMES = {"p50": 0.0101, "p95": 0.0202, "p99": None, "max": 0.5}


def client(number: int, rate: float | None = 10.0) -> dict[str, Any]:
    return {"client": number, "requests": 2, "tokens": 7, "tok_s": rate, "first_token_s": 0.25}


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
        "sampled": 3,
        "cancelled_early": 1,
        "seconds": 2.04,
        "tokens": 100,
        "tok_s": 49.0,
        "first_token_s": TIMES,
        "token_gap_s": TIMES | {"p50": None},
        "fairness": {"clients": [client(0)], "jain": 0.98765},
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
alone     8 compared, 8 equal, 0 near-ties; not compared: 3 sampled, 1 cancelled
          before a token
errors    0 mismatches, 0 failures, 0 lost answers, 0 duplicates, 0 leaks, 0 not
          recovered

milliseconds         p50   p95  p99    max
to the first token  10.1  20.2    -  500.0
between tokens         -  20.2    -  500.0

client  requests  tokens  tok/s  first token, ms
     0         2       7   10.0            250.0
tok/s: of a client's completed answers, by their seconds from sending to end,
queueing included
Jain's fairness index of these: 0.988

passed: 8 answers compared with the same request run alone
"""


def shown(**changed: Any) -> str:
    return render(*report_parts(found(**changed)))


def test_run_that_passed() -> None:
    assert shown() == SNAPSHOT


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"emulation": "host 2x", "tok_s": None},
            "100 tokens fiddler on cpu, experts int4, backbone bf16; emulation: host 2x",
        ),
        ({"unsent": 4}, "12 of 16 requests by 3 clients"),
        ({"preemptions": 1}, "KV reused for 0 prompt tokens; 1 preemption"),
        ({"refused": 1}, "refused: the script's invalid requests, such as one beyond the context"),
        ({"leaks_checked": False}, "leaks not checked: the run was interrupted"),
        (
            {"compared": 1, "near_ties": 2},
            "passed: 1 answer compared with the same request run alone (2 near-ties)",
        ),
        ({"requests": 13}, "3 sampled, 1 cancelled before a token, 1 without an answer"),
        ({"passed": False, "lost": 1, "leaks": 2}, "FAILED: 1 lost answer, 2 leaks"),
        ({"passed": False, "finished": False, "failures": 1}, "FAILED: the run was interrupted, 1 failure"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_lines_of_other_runs(changed: dict[str, Any], line: str) -> None:
    assert line in " ".join(shown(**changed).split())


def numbers(text: str) -> list[str]:
    """The first column of the table of clients."""
    return [line.split()[0] for line in text.splitlines() if line.endswith(" 250.0")]


def test_of_many_clients_three_are_shown_by_their_rate() -> None:
    every = [client(number, 30.0 - number) for number in range(MOST_CLIENTS)]
    assert len(numbers(shown(fairness={"clients": every, "jain": 1}))) == MOST_CLIENTS
    every += [client(98, None), client(99, 99.0)]
    text = shown(fairness={"clients": every, "jain": None})
    assert numbers(text) == [str(MOST_CLIENTS - 1), "7", "99"]
    assert "the slowest, the middle and the fastest of 18 are shown" in " ".join(text.split())
    assert f"index of these: {MISSING}" in text
    unknown = [client(number, None) for number in range(MOST_CLIENTS + 1)]
    assert numbers(shown(fairness={"clients": unknown, "jain": None})) == []


def test_details_have_a_title_and_an_end() -> None:
    lines = [f"request {number}" for number in range(MOST_DETAILS + 3)]
    details = found()["details"] | {"near_ties": ["a tie"], "lost": lines[:MOST_DETAILS], "leaks": lines}
    text = shown(details=details, near_ties=1, lost=20, leaks=23)
    title = "1 near-tie: first differences where rounding decides, less than 0.05 nats below"
    assert title in " ".join(text.split())
    assert "  a tie" in text.splitlines()
    lost, leaks = text.partition("\n20 lost answers\n")[2].split("\n23 leaks\n")
    assert lost.split() == " ".join(lines[:MOST_DETAILS]).split()
    assert "  and 3 more (all with --json)" in leaks.splitlines()
