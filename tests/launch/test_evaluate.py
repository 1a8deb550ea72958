"""`evaluate`: the items it takes, and its answers on the embedded model against transformers'."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import run
from msgspec.structs import replace
from test_bench_command import WELCOME, StandInEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.bench import command
from launch.command_line.options import parse
from launch.errors import Disturbed, WrongUsage
from launch.score import evaluate
from launch.score.evaluate import read_items
from launch.terminal.interrupts import Interrupts
from pipeline.assets import items, model_dir
from protocol.messages import PolicyChanged, Scores

NONE = tuple(np.zeros((0, 0), kind) for kind in ("float32", "int32", "float32"))  # of a block of scores

GOOD: dict[str, Any] = {"context": "a b", "choices": [" c", " d"], "answer": 1}


def written(path: Path, *entries: object) -> Path:
    file = path / "items.jsonl"
    file.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{", "this is not JSON"),
        (
            GOOD | {"contxt": "x"},
            "Object contains unknown field `contxt`; known are context, choices",
        ),
        ({"context": "a", "choices": [" c", " d"]}, "Object missing required field `answer`"),
        (GOOD | {"context": ""}, "Expected `str` of length >= 1 - at `$.context`"),
        (GOOD | {"choices": [" c", " c"]}, "choices must be different texts"),
        (GOOD | {"answer": 2}, "answer must be an index of the choices, 0 to 1"),
        ('{"context": "a", "choices": ["\\ud800", "b"], "answer": 0}', "this is not JSON"),
    ],
)
def test_a_wrong_item_is_named_by_its_line(entry: object, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, entry)
    with pytest.raises(WrongUsage) as refused:
        read_items(path)
    assert f"{path}, line 2: {reason}" in str(refused.value)


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="has no item"):
        read_items(written(tmp_path, "", " "))


def oracle(path: Path) -> list[list[float]]:
    """Each choice's log-probability by transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    every = []
    for item in read_items(path):
        before = len(tokenizer.encode(item.context)) - 1
        scores = []
        for choice in item.choices:
            ids = torch.tensor([tokenizer.encode(item.context + choice)])
            with torch.inference_mode():
                logprobs = model(ids).logits[0].log_softmax(-1)
            scores.append(float(logprobs[range(before, ids.shape[1] - 1), ids[0, before + 1 :]].sum()))
        every.append(scores)
    return every


def test_the_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """Items of several kinds, under two exact policies."""
    lines = items().read_text(encoding="utf-8").splitlines()[20::126]
    path = written(tmp_path, *lines)
    code, out, error = run("evaluate", "--items", str(path), "--policy", "all-host,on-demand", "--json")
    assert code == 0, error
    found = json.loads(out)
    expected = oracle(path)
    right = 0
    for i, (item, scores) in enumerate(zip(read_items(path), expected, strict=True)):
        best = max(scores)
        for policy in found["policies"]:
            assert scores[policy["answers"][i]] > best - 0.05  # bf16 may turn a tie over
        right += found["policies"][0]["answers"][i] == item.answer
    first, second = found["policies"]
    assert (first["name"], second["name"], second["exact"]) == ("all-host", "on-demand", True)
    assert first["items"] == len(lines)
    assert first["accuracy"] == pytest.approx(right / len(lines))
    kinds = first["kinds"].values()
    assert sum(kind["items"] * kind["accuracy"] for kind in kinds) == pytest.approx(right)


def test_an_item_longer_than_the_context_ends_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD | {"context": "word " * 400})
    code, out, error = run("evaluate", "--items", str(path), "--context", "64", "--policy", "all-host")
    assert (code, out) == (2, "")
    assert f"{path}, line 2: " in error.splitlines()[-1]


# A tokenizer that joins "y" with what follows: the tokens of each text, and their log-probabilities.
JOINED: dict[str, tuple[list[int], list[float]]] = {
    "x y": ([1, 2, 3], []),
    "x ya": ([1, 2, 4], [-1.0, -3.0]),
    "x yb": ([1, 2, 5], [-1.0, -2.0]),
    "x y c": ([1, 2, 3, 6], [-1.0, -0.5, -4.0]),
    "x y ": ([1, 2, 3], [-1.0, -0.5]),
}


class ScoringEngine(StandInEngine):
    """Scores the texts of JOINED. `other`: a policy that another client sets after the first score."""

    def __init__(self) -> None:
        super().__init__()
        self.welcome, self.other = replace(WELCOME, has_tokenizer=True), ""

    async def score(self, **fields: Any) -> AsyncIterator[Scores]:
        tokens, given = JOINED[fields["text"]]
        chosen = np.array(given or [0.0] * (len(tokens) - 1), np.float32)
        if self.other and self.on_policy is not None:
            self.on_policy(PolicyChanged(0, self.other, True, ()))
        yield Scores(
            0,
            0,
            np.array(tokens, np.int32),
            chosen,
            *NONE,
        )


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> ScoringEngine:
    engine = ScoringEngine()

    @asynccontextmanager
    async def connected(*_: object) -> AsyncIterator[ScoringEngine]:
        yield engine

    monkeypatch.setattr(command, "connected", connected)
    return engine


async def evaluated(path: Path, *words: str) -> None:
    line = ["evaluate", "--items", str(path), "--json", *words]
    assert await evaluate.evaluate(parse(line), Interrupts()) == 0


async def test_choices_that_join_the_contexts_last_token_are_compared_with_it(
    scoring: ScoringEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first token that differs: -3, -2, and -0.5 - 4."""
    path = written(tmp_path, {"context": "x y", "choices": ["a", "b", " c"], "answer": 1})
    await evaluated(path)
    (found,) = json.loads(capsys.readouterr().out)["policies"]
    assert (found["answers"], found["accuracy"]) == ([1], 1)


async def test_a_running_engine_has_its_policy_again(scoring: ScoringEngine, tmp_path: Path) -> None:
    path = written(tmp_path, {"context": "x y", "choices": ["a", "b"], "answer": 1})
    await evaluated(path, "--connect", "--policy", "all-host,fiddler")
    named = [event for event in scoring.events if event[0] in ("all-host", "fiddler", "dali")]
    assert named == [("all-host", {}, False), ("fiddler", {}, False), ("dali", {"a": "b"}, True)]
    scoring.other = "on-demand"
    for words in (("--policy", "all-host"), ()):
        with pytest.raises(Disturbed, match="another client set the policy on-demand"):
            await evaluated(path, "--connect", *words)
