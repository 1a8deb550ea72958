"""Engines as processes, from their start to their end: orderly, interrupted, killed; no file remains."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engines import (
    LAUNCH,
    LIMIT,
    Launched,
    engines_left,
    own_segments,
    run,
    runs,
    store_of,
)
from fork_server import ForkedPython
from waiting import wait_until

from launch.processes.cores import Cores
from launch.terminal.progress import LINE_INTERVAL

# `launch.py` where these streams, given by their numbers, are closed.
CLOSED = """
import os, sys
from launch.cli import main
for number in map(int, sys.argv.pop(1)):
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)
sys.exit(main(sys.argv[1:]))
"""

pytestmark = pytest.mark.timeout(300)  # several engines start in a test, on a machine that may be busy


@pytest.fixture
def arguments(tiny_model: Path) -> list[str]:
    return ["--model", str(tiny_model), "--device", "cpu", "--workers", "2", "--chunk", "32"]


def test_engine_serves_every_command_and_stops_on_sigint(arguments: list[str], tmp_path: Path) -> None:
    """Its log includes its memory plan."""
    with Launched("serve", "--name", "cycle", "--log-level", "info", *arguments, executed=True) as engine:
        name, endpoint = engine.line().split()
        assert name == "cycle"
        assert endpoint.startswith("ipc://")

        code, out, _ = run(
            *"generate --prompt-tokens 5,6,7 --max-tokens 4 --ignore-eos --json --connect cycle".split(),
            executed=True,
        )
        assert code == 0
        answer = json.loads(out)
        assert set(answer) == {
            *("token_ids", "text", "finish_reason", "prefill_tok_s", "decode_tok_s"),
            *("policy", "fidelity", "stats"),
        }
        assert len(answer["token_ids"]) == 4
        assert all(0 <= token < 4096 for token in answer["token_ids"])
        assert answer["finish_reason"] == "length"
        assert answer["policy"] == "all-host"

        ids, matrix = tmp_path / "ids.json", tmp_path / "scores.npy"
        ids.write_text(json.dumps(list(range(10, 30))))
        code, out, _ = run("score", "--tokens", str(ids), "--out", str(matrix), "--json", "--connect")
        assert code == 0
        assert json.loads(out)["tokens"] == 20
        scores = np.load(matrix, allow_pickle=False)
        assert scores.shape == (20, 4096)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(np.exp(scores.astype(np.float64)).sum(axis=1), 1.0, rtol=1e-5)
        chosen = scores[np.arange(19), np.arange(11, 30)]
        assert json.loads(out)["mean_nll"] == pytest.approx(-chosen.mean(), rel=1e-5)

        text = [7 * i % 4000 for i in range(400)]  # longer than the model's context of 256
        ids.write_text(json.dumps(text))
        windows = ("--out", str(matrix), "--json", "--connect")
        code, out, _ = run("score", "--tokens", str(ids), *windows)
        assert code == 0
        found = json.loads(out)
        assert (found["tokens"], found["windows"]) == (400, 3)
        scores = np.load(matrix, allow_pickle=False)
        assert scores.shape == (400, 4096)
        assert found["mean_nll"] == pytest.approx(-scores[np.arange(399), text[1:]].mean(), rel=1e-5)
        ids.write_text(json.dumps(text[144:]))  # the last window by itself
        score = [sys.executable, LAUNCH, "score", "--tokens", str(ids), "--out", str(matrix), "--connect"]
        closed = subprocess.run(["sh", "-c", f"{shlex.join(score)} <&- 2>&-"], stdout=subprocess.PIPE)
        assert closed.returncode == 0
        assert b"windows" not in closed.stdout
        last = np.load(matrix, allow_pickle=False)
        np.testing.assert_array_equal(scores[383:], last[383 - 144 :])

        many = [*"generate --prompt-tokens 5,6 --max-tokens 200 --ignore-eos --connect".split()]
        with Launched(*many, executed=True) as generate:  # the reader of its stdout closes it
            assert generate.process.stdout is not None
            generate.process.stdout.read(1)
            generate.process.stdout.close()
            generate.process.stdout = None
            code, _, err = generate.end()
        assert code == 0
        assert "Traceback" not in err
        assert "Broken" not in err

        code, out, err = run("generate", "--prompt-tokens", "4096", "--connect")
        assert (code, out) == (2, "")
        assert "4096" in err
        code, out, err = run("generate", "--prompt-tokens", ",".join(["5"] * 300), "--connect")
        assert (code, out) == (2, "")  # refused by the engine, which has not failed
        assert "300 tokens" in err

        engine.send(signal.SIGINT)
        code, _, err = engine.end()
        assert code == 0
    assert err.splitlines()[-1] == "[tandem] engine cycle stopped by SIGINT"
    (line,) = re.findall(r"^\[tandem\] memory: .*$", err, re.M)
    assert re.search(
        r"experts [\d.]+ kB \(bf16\), KV cache [\d.]+ kB \(1024 tokens in bf16\), backbone", line
    )
    assert "--format" not in err
    assert engines_left() == []
    assert own_segments("cycle") == []


def test_a_start_in_a_pipe_says_two_lines(arguments: list[str]) -> None:
    generate = "generate --prompt-tokens 5 --max-tokens 1 --json".split()
    code, out, err = run(*generate, *arguments)
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 1
    what, *progress, ready = (line for line in err.splitlines() if line.startswith("[tandem] "))
    assert re.fullmatch(
        r"\[tandem\] tiny: experts bf16, rest bf16; memory [\d.]+ [MG]B of [\d.]+ [MG]B", what
    )
    ready_after = re.fullmatch(
        r"\[tandem\] engine \w+ is ready after ([\d.]+) s: all-host on the CPU, 2 workers", ready
    )
    assert ready_after is not None
    assert len(progress) <= float(ready_after[1]) / LINE_INTERVAL
    assert not {"\r", "\x1b"} & set(err)
    code, _, err = run(*generate, *arguments, "--log-level", "warning")
    assert (code, "[tandem]" in err) == (0, False)


def check_cores(engine: Launched, workers: int) -> None:
    """Each worker is bound to its own cores and computes with as many threads; the coordinator may use all
    cores."""
    found = [child for child in engine.children() if runs(child, "workers.expert_worker")]
    cores = Cores.here()
    cpu_sets = cores.for_workers(workers)
    assert sorted(tuple(child.cpu_affinity()) for child in found) == sorted(cpus.cores for cpus in cpu_sets)
    threads = sorted(int(child.environ()["OMP_NUM_THREADS"]) for child in found)
    assert threads == sorted(len(cpus.cores) for cpus in cpu_sets)
    assert engine.child("pipeline.coordinator").cpu_affinity() == cores.numbers
    # Only the thread that watches the parent started before the process was bound.
    bound = os.sched_getaffinity(found[0].pid)
    assert sum(os.sched_getaffinity(thread.id) != bound for thread in found[0].threads()) <= 1


def test_two_engines_share_a_store_and_stop_independently(arguments: list[str], tiny_model: Path) -> None:
    generate = "generate --prompt-tokens 5 --max-tokens 2 --ignore-eos --json --connect".split()
    with Launched("serve", "--name", "left", *arguments) as left:
        left.line()
        check_cores(left, 2)
        code, expected, _ = run(*generate)
        assert code == 0
        assert len(json.loads(expected)["token_ids"]) == 2
        store = store_of(tiny_model).stat().st_ino
        with Launched("serve", "--name", "right", *arguments, "--workers", "1") as right:
            right.line()
            check_cores(right, 1)
            assert store_of(tiny_model).stat().st_ino == store
            assert engines_left() == ["left", "right"]
            code, _, err = run("generate", "--prompt-tokens", "5", "--connect")
            assert code == 2
            assert "left (tiny), right (tiny)" in err
            left.send(signal.SIGTERM)
            assert left.end()[0] == 0
            assert store_of(tiny_model).stat().st_ino == store
            code, out, _ = run(*generate, "right")
            assert code == 0
            assert json.loads(out)["token_ids"] == json.loads(expected)["token_ids"]
            right.child("pipeline.coordinator").suspend()  # it would delay an orderly end
            began = time.monotonic()
            right.send(signal.SIGINT)
            time.sleep(0.2)
            right.send(signal.SIGINT)
            right.end()
            assert time.monotonic() - began < 5  # an orderly end would wait longer for the coordinator alone
    assert engines_left() == []
    assert not store_of(tiny_model).exists()


def test_kept_store_is_attached_by_the_next_start(arguments: list[str], tiny_model: Path) -> None:
    """The standard streams of the commands are closed."""
    generate = [*"generate --prompt-tokens 5 --max-tokens 1".split(), *arguments]
    with ForkedPython("-c", CLOSED, "2", *generate, "--keep-store", stdout=subprocess.DEVNULL) as process:
        assert process.wait(LIMIT) == 0
    assert engines_left() == []
    assert store_of(tiny_model).exists()
    with ForkedPython(
        "-c", CLOSED, "01", *generate, "--log-level", "info", stderr=subprocess.PIPE
    ) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert engines_left() == []
    assert "0 B read from the checkpoint, 0 B from the cache" in err
    assert not store_of(tiny_model).exists()


def test_answer_cancelled_by_the_engine_is_one_line_and_exit_1(arguments: list[str], tmp_path: Path) -> None:
    ids, matrix = tmp_path / "ids.json", tmp_path / "scores.npy"
    ids.write_text(json.dumps([5] * 250))
    slow = ("--host-slowdown", "500", "--chunk", "1")
    with Launched("serve", "--name", "leaving", *arguments, *slow) as engine:
        engine.line()
        generate = "generate --prompt-tokens 5,6 --max-tokens 240 --ignore-eos --connect".split()
        score = ["score", "--tokens", str(ids), "--stepwise", "--out", str(matrix), "--connect"]
        with Launched(*generate) as first, Launched(*score) as second:
            assert first.process.stdout is not None
            first.process.stdout.read(1)
            assert wait_until(lambda: any(p.stat().st_size > 50_000 for p in tmp_path.glob(".scores*")), 30)
            engine.send(signal.SIGTERM)
            ends = [first.end(), second.end()]
        assert engine.end()[0] == 0
        assert "emulation: host slowed by 500" in engine.stderr
    for code, _, err in ends:
        assert code == 1
        (line,) = (line for line in err.splitlines() if not line.startswith("[tandem] "))
        assert line.startswith("launch.py: the engine cancelled this ")
    assert list(tmp_path.iterdir()) == [ids]
