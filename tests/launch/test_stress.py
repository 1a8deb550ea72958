"""Runs of `stress` on real engines: runs that pass, and every fault that must fail a run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Launched, launch, run
from msgspec import structs
from waiting import wait_until

from launch.equality import Comparison, Verdict
from launch.stress.chaos import Chaos, Injector
from launch.stress.load import End, Finding, Load, Outcome, Request, ask, compare_all
from launch.stress.report import ERRORS, StressRun, report, report_parts
from launch.terminal.tables import print_parts
from pipeline.config import EngineConfig
from protocol.messages import ChatMessage, Sampling, Token, Welcome

BOUND = 1e-4
F32 = ["--format", "f32", "--backbone-dtype", "f32"]
LINES = [
    {"prompt": "A list of"},
    {"prompt": "A list of", "max_tokens": 7},
    {"name": "a chat", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 20},
    {"name": "talk", "turns": ["What is a list?", "And a tuple?", "Why?"], "max_tokens": 12},
    {"name": "cut talk", "turns": ["Go on.", "Go on."], "cancel_after": 2},
    {"prompt": "def main():", "cancel_after": 0},
    {"prompt": "def main():", "cancel_after": 5, "max_tokens": 60},
    {"name": "too long", "prompt": "long " * 300},
    {"name": "too long a talk", "turns": ["long " * 300, "This is never sent."]},
    {"prompt": "At random", "temperature": 1.0, "seed": 3, "max_tokens": 8},
    {"prompt": "late", "delay": 0.2, "max_tokens": 1},
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES))
    return path


def test_run_with_four_clients_passes(script: Path, tiny_model: Path) -> None:
    """An engine with two contexts of KV cache, four clients, twice through the script."""
    options = ["--clients", "4", "--repeat", "2", "--kv-tokens", "512", "--model", str(tiny_model), *F32]
    code, out, err = run("stress", "--script", str(script), "--json", *options)
    assert code == 0, (out, err)
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["passed"]
    assert found["finished"]
    assert found["leaks_checked"]
    expected = {
        **{"requests": 28, "completed": 16, "cancelled": 8, "refused": 4, "unsent": 2},
        **{"mismatches": 0, "failures": 0, "lost": 0, "doubled": 0, "leaks": 0, "unhealed": 0},
        "chaos": None,
        **{"clients": 4, "policy": "all-host", "format": "f32", "emulation": "", "near_tie_bound": BOUND},
    }
    assert {key: found[key] for key in expected} == expected
    assert (
        24 <= found["compared"] <= 26
    )  # all but sampled requests and those cancelled before the first token
    assert found["equal"] + found["near_ties"] == found["compared"]
    assert found["kv_reused_tokens"] > 0  # by the conversations
    for times in (found["first_token_s"], found["token_gap_s"]):
        assert 0 <= times["p50"] <= times["p95"] <= times["p99"] <= times["max"] < found["seconds"]


def test_interrupt_and_engine_exit_end_a_run_with_its_report(script: Path, tiny_model: Path) -> None:
    """Either ends the run early with exit code 1 and a report of the run so far."""
    endless = ["--script", str(script), "--repeat", "10000", "--json"]
    environment = os.environ | {"COLUMNS": "80"}
    with Launched("serve", "--name", "stressed", "--model", str(tiny_model)) as engine:
        assert engine.line().startswith("stressed ")
        with Launched("stress", *endless, "--connect", "stressed") as first:
            wait_for_load(engine)
            first.send(signal.SIGINT)
            code, out, err = first.end()
        assert code == 1
        assert err.splitlines()[-1] == "launch.py: interrupted"
        found = json.loads(out)
        assert not found["passed"]
        assert not found["finished"]
        assert found["failures"] == found["lost"] == 0

        plain = ["stress", "--script", str(script), "--connect", "--clients", "3"]
        done = launch(*plain, limit=100, env=environment)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert "\x1b" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "passed" in done.stdout.splitlines()[-1]

        with Launched("stress", *endless, "--connect") as second:
            wait_for_load(engine)
            engine.child("pipeline.coordinator").kill()
            code, out, err = second.end()
        assert code == 1
        assert "Traceback" not in err
        found = json.loads(out)
        assert not found["passed"]
        assert found["failures"] >= 1
        assert found["unsent"] > 1000
        engine.send(signal.SIGINT)
        assert engine.end()[0] == 0


def wait_for_load(engine: Launched) -> None:
    """Wait until its coordinator has served some requests."""
    coordinator = engine.child("pipeline.coordinator")
    before = coordinator.cpu_times().user
    assert wait_until(lambda: coordinator.cpu_times().user > before + 0.3, 60.0)


async def test_a_third_token_counts_by_its_own_distance_to_the_best(start_engine, tiny_model: Path) -> None:
    """Whatever its rank, a token is a near-tie within the bound, and a mismatch beyond it."""
    config = EngineConfig(model=tiny_model, format="f32", backbone_dtype="f32")
    async with start_engine(config) as (_, client):
        request = Request("a list", "A list of", None, 6, Sampling())
        whole = await ask(client, request)
        at, margins = 3, {}
        for rival in range(20, 25):
            steps = (await ask(client, replace(request, rival=rival))).steps
            assert [step.token for step in steps] == [step.token for step in whole.steps]
            assert {step.runner_up for step in steps} == {rival}
            margins[rival] = steps[at].margin
        second = whole.steps[at]
        others = {t: margin for t, margin in margins.items() if t not in (second.token, second.runner_up)}
        for token, margin in others.items():
            assert margin > second.margin  # so the second token's margin alone would not do
            changed = structs.replace(whole.tokens[at], token=token)
            other = replace(whole, tokens=[*whole.tokens[:at], changed, *whole.tokens[at + 1 :]])
            for bound, verdict in (
                (margin + 0.01, Verdict.NEAR_TIE),
                (margin - 0.01, Verdict.MISMATCH),
                (second.margin + (margin - second.margin) / 2, Verdict.MISMATCH),
            ):
                findings: list[Finding] = []
                await compare_all(client, [other], bound, findings.append)
                (found,) = findings
                assert found.verdict is verdict
                assert found.comparison.margin == pytest.approx(margin, abs=1e-3)
        refused = await ask(client, replace(request, rival=client.welcome.vocabulary))
        assert refused.end is End.REFUSED


async def test_end_of_an_answer_is_compared_like_a_token(start_engine) -> None:
    """The embedded model ends its answers; a longer answer is a near-tie only if it continues with the
    runner-up of the end token, and within the bound."""
    async with start_engine(EngineConfig()) as (_, client):
        for question in ("What does grep do?", "What is a row?", "What is a key?", "What is a lock?"):
            chat = (ChatMessage("user", question),)
            whole = await ask(client, Request("chat", None, chat, 64, Sampling()))
            if whole.end is End.STOP:
                break
        assert whole.end is End.STOP
        step = whole.steps[-1]
        assert len(whole.steps) == len(whole.tokens) + 1

        def continued(token: int) -> Outcome:
            more = [Token(0, len(whole.tokens) + i, token, "") for i in range(2)]
            return replace(whole, tokens=whole.tokens + more, end=End.LENGTH, stats={})

        cut = replace(whole, tokens=whole.tokens[:-1])  # ends one token before
        outcomes = [whole, continued(step.runner_up), continued(step.token)]
        for bound, near in ((step.margin + 0.01, Verdict.NEAR_TIE), (step.margin / 2, Verdict.MISMATCH)):
            findings: list[Finding] = []
            await compare_all(client, outcomes, bound, findings.append)
            assert [f.verdict for f in findings] == [Verdict.EQUAL, near, Verdict.MISMATCH]
        findings.clear()
        await compare_all(client, [cut], 0.0, findings.append)
        assert [f.verdict for f in findings] == [Verdict.MISMATCH]


WELCOME = Welcome(1, "e", "m", "f", "cpu", "all-host", True, 4096, 256, True, True, "link paced to 1 GB/s")


def outcome(*indices: int, end: End = End.LENGTH, error: str = "") -> Outcome:
    tokens = [Token(0, index, 5, "x", 1.0, 6) for index in indices]
    request = Request("a request", "a", None, 9, Sampling())
    return Outcome(request, 0.0, tokens, [0.5 + 0.1 * i for i in range(len(tokens))], end, 2.0, "x", error)


async def no_stats() -> dict[str, Any]:
    return {}


def unrecovered() -> Injector:
    injector = Injector(no_stats, Path("/nowhere"), Chaos(("kill",)), supervisor=os.getpid())
    injector.missing = ["worker 1 is not up"]
    return injector


FAULTY = {
    "mismatches": StressRun(
        "s", WELCOME, BOUND, Load([[outcome(0, 1)]]), [Finding("a", Comparison(Verdict.MISMATCH))]
    ),
    "failures": StressRun("s", WELCOME, BOUND, Load([[outcome(0, end=End.FAILED, error="it broke")]])),
    "lost": StressRun("s", WELCOME, BOUND, Load([[outcome(0, end=End.LOST, error="no message")]])),
    "doubled": StressRun("s", WELCOME, BOUND, Load([[outcome(0, 1, 1)]])),
    "leaks": StressRun("s", WELCOME, BOUND, Load([[outcome(0)]]), leaks=["3 requests run"]),
    "unhealed": StressRun("s", WELCOME, BOUND, Load([[outcome(0)]]), chaos=unrecovered()),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_every_fault_fails_a_run_and_is_shown(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(FAULTY[fault], finished=True)
    found = report(run)
    assert not found["passed"]
    assert {name: found[name] for name in ERRORS} == {name: int(name == fault) for name in ERRORS}
    print_parts(*report_parts(found))
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"FAILED: {fault} 1"
    assert "emulation: link paced to 1 GB/s" in shown
    assert found["details"][fault][0] in shown


def test_stray_messages_and_an_interrupt_fail_a_run() -> None:
    run = StressRun("s", WELCOME, BOUND, Load([[outcome(0)]], strays={0: 2}), finished=True)
    assert report(run)["doubled"] == 1
    assert not report(replace(run, load=Load([[outcome(0)]]), finished=False))["passed"]
    assert report(replace(run, load=Load([[outcome(0)]])))["passed"]
