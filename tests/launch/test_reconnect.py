"""Commands that resume when the coordinator is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from engines import LIMIT, Launched, runs
from terminal import TMUX, Terminal
from waiting import wait_until

NAME = "reconnect"
CONNECT = ("--connect", NAME)
COORDINATOR = "pipeline.coordinator"
WAITING = "[tandem] the engine does not answer; waiting for it"
ANSWERS = "[tandem] the engine answers again"
# In float32, so that rounding shows in no token; slowly enough to be killed in the middle, also where an
# answer repeats itself.
ENGINE = (
    *("--name", NAME, "--format", "f32", "--backbone-dtype", "f32"),
    *("--host-slowdown", "48", "--chunk", "32", "--speculate", "off"),
)


def answer(*extra: str) -> tuple[str, ...]:
    prompt = ("generate", "--prompt", "Once", "--max-tokens", "200", "--ignore-eos", *CONNECT)
    return (*prompt, *extra)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Launched]:
    with Launched("serve", "--model", str(tiny_model), *ENGINE) as engine:
        assert engine.line().startswith(NAME), engine.stderr
        yield engine
        engine.send(signal.SIGINT)
        assert engine.end()[0] == 0, engine.stderr


def output(launched: Launched) -> str:
    code, out, err = launched.end()
    assert code == 0, err
    return out


def largest(folder: Path, pattern: str) -> int:
    """Bytes of the largest of these files; one may get its name, or lose it, meanwhile."""
    sizes = [0]
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def test_answers_and_scores_resume_after_a_coordinator_restart(engine: Launched, tmp_path: Path) -> None:
    seeded = answer("--temperature", "0.9", "--seed", "4")
    ids, rows, again = tmp_path / "ids.json", tmp_path / "rows.npy", tmp_path / "again.npy"
    ids.write_text(json.dumps([5 + i * 7 % 4000 for i in range(250)]))
    score = ("score", "--tokens", str(ids), "--stepwise", "--json", *CONNECT, "--out")
    with Launched(*seeded) as launched, Launched(*score, str(rows)) as scoring:
        whole, report = output(launched), json.loads(output(scoring))
    # One after the other: neither can have ended when it is known to have begun.
    with Launched(*seeded) as launched:
        assert os.read(launched.process.stdout.fileno(), 1) == whole[0].encode()  # and buffer nothing
        engine.child(COORDINATOR).kill()
        code, out, err = launched.end()
        assert (code, whole[0] + out) == (0, whole), err
        assert err.count(WAITING) == err.count(ANSWERS) == 1
    with Launched(*score, str(again)) as scoring:
        assert wait_until(lambda: largest(tmp_path, "*again*") > 100_000, LIMIT)
        engine.child(COORDINATOR).kill()
        code, out, err = scoring.end()
        assert code == 0, err
        assert json.loads(out)["tokens"] == report["tokens"] == 250
    first, second = np.load(rows), np.load(again)
    assert first.shape == second.shape
    assert np.abs(first - second).max() < 1e-4
    assert any(runs(child, COORDINATOR) for child in engine.children())


@pytest.mark.skipif(TMUX is None, reason="tmux is not installed")
def test_chat_resumes_after_a_coordinator_restart(engine: Launched, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    arguments = ("chat", *CONNECT, "--ignore-eos", "--max-tokens", "120", "--seed", "4")
    summary = r"^120 tokens ·(?s:.+)\n\n>$"
    with Terminal(*arguments, env=env, height=120) as terminal:
        terminal.until(r"^/help lists.*\n\n>")
        terminal.line("Hi?")
        terminal.until(summary)
        terminal.line("/retry")
        terminal.until(lambda screen: screen.count("Hi?") == 1 and "> /retry\n" in screen)
        before = len(terminal.screen())
        terminal.until(lambda screen: len(screen) > before + 60)
        engine.child(COORDINATOR).kill()
        shown = terminal.until(r"^the engine answers again$", LIMIT)
        assert shown.count("the engine does not answer; waiting for it") == 1
        shown = terminal.until(lambda screen: len(re.findall("^120 tokens ·", screen, re.M)) == 2, LIMIT)
        first, second = re.findall(r"^> (?:Hi\?|/retry)\n((?s:.+?))^120 tokens ·", shown, re.MULTILINE)
        answers = re.sub(r"\n?^the engine (?:does not|answers).*\n", "", second, flags=re.MULTILINE)
        assert re.sub(r"\s", "", answers) == re.sub(r"\s", "", first)

        terminal.until(r"\n\n>$")
        terminal.line("Go on")
        engine.child(COORDINATOR).send_signal(signal.SIGSTOP)
        terminal.until(r"^> Go on\n(?s:.*)^the engine does not answer")
        terminal.keys("C-c")
        terminal.until(r"^> Go on\n(?s:.+)cancelled .*\n\n>$", 4.0)  # with no engine to say it
        terminal.type("half a li")
        terminal.until("^the engine answers again\n> half a li$", LIMIT)  # above what is being typed
        terminal.keys("C-c", "C-d")
        assert terminal.end() == (0, True)
