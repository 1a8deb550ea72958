"""Guesses of next tokens change no token, right or wrong, and are made where they gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from families import Case, save
from step_runs import through
from test_scheduler import BOUND, Harness
from thread_engine import engine_in_threads

from launch.equality import Verdict, compare
from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.device.cpu import CpuDevice
from pipeline.models.registry import model_spec
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling import drafts
from pipeline.scheduling.drafts import Draft
from pipeline.scheduling.speculation import GAIN, MOST, OVERLAP, StepCosts, best_numbers
from protocol.messages import Generate, Sampling, Shaping, Token

PROMPT = (5, 6, 7, 8, 9, 5, 6, 7)
COUNT = 24
GREEDY = {"sampling": Sampling()}
SAMPLED = {
    "sampling": Sampling(temperature=1.5, top_k=40, repetition_penalty=1.2, seed=7),
    "shaping": Shaping(presence_penalty=0.3, frequency_penalty=0.2),
    "logprobs": 2,
}

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory) -> Iterator[Any]:
    with engine_in_threads(tiny_model, tmp_path_factory.mktemp("s")) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("all-host", {}), 1), None)
        yield engine


def answers(engine: Any, speculate: Any, asked: dict[str, Any]) -> tuple[list[Any], Any]:
    """Two requests at once, that ask for the same: their messages, and what was guessed."""
    harness = Harness(engine, speculate=speculate)
    for request in range(2):
        prompt = PROMPT[: len(PROMPT) - request]
        message = Generate(request, token_ids=prompt, max_tokens=COUNT, ignore_eos=True, **asked)
        harness.scheduler.enqueue(b"c", message)
    harness.finish()
    stats = harness.scheduler.speculation.stats()
    given = [harness.answer(request) for request in range(2)]
    harness.check_empty()
    return given, stats


def same(tokens: Sequence[Token], expected: Sequence[Token]) -> bool:
    return compare([t.token for t in tokens], expected, BOUND).verdict is not Verdict.MISMATCH


def knowing(known: list[list[Token]], wrong: int) -> type:
    """A draft that knows the answers, and is wrong by so much."""
    follows = {PROMPT[: len(PROMPT) - n]: [t.token for t in tokens] for n, tokens in enumerate(known)}

    class Knowing:
        def __init__(self, tokens: list[int]) -> None:
            self._tokens = tokens
            self._answer = follows[tuple(tokens[: -1 if len(tokens) > 1 else None])]
            self._prompt = len(tokens) - 1

        def follow(self) -> None:
            pass

        def tokens(self, most: int) -> list[int]:
            at = len(self._tokens) - self._prompt
            return [abs(token - wrong) for token in self._answer[at : at + most]]

        def chances(self, most: int) -> list[float]:
            return [1.0] * len(self.tokens(most))

    return Knowing


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_guess_changes_a_token(engine, asked, monkeypatch) -> None:
    alone, stats = answers(engine, "off", asked)
    assert stats["drafted"] == 0
    assert all(len(tokens) == COUNT for tokens, _ in alone)
    for wrong in (0, 1):
        monkeypatch.setattr(drafts, "Draft", knowing([tokens for tokens, _ in alone], wrong))
        guessed, stats = answers(engine, 3, asked)
        for (tokens, done), (expected, _) in zip(guessed, alone, strict=True):
            assert same(tokens, expected)
            assert done.reason == "length"
            assert done.stats["decode_tokens"] == COUNT - 1
        right = stats["drafted"] if wrong == 0 else 0
        assert (stats["accepted"], stats["drafted"] > COUNT) == (right, True)
        assert sum(done.stats["accepted_tokens"] for _, done in guessed) == right


def test_answer_ends_within_right_guesses(engine, monkeypatch) -> None:
    """At its end token no guess behind it is told."""
    (first, second), _ = answers(engine, "off", GREEDY)
    monkeypatch.setattr(drafts, "Draft", knowing([first[0], second[0]], 0))
    tokens = [t.token for t in first[0]]
    end = next(at for at in range(5, COUNT) if tokens[at] not in tokens[:at])
    harness = Harness(engine, speculate=MOST)
    message = Generate(0, token_ids=PROMPT, max_tokens=COUNT)
    harness.scheduler._jobs._eos = frozenset({tokens[end]})
    harness.run(b"c", message)
    told, done = harness.answer(0)
    assert [t.token for t in told] == tokens[:end]
    assert (done.reason, done.stats["end"]["token"]) == ("stop", tokens[end])
    harness.check_empty()


def test_own_text_is_guessed_without_a_change(engine) -> None:
    """What the model repeats is accepted; nothing depends on how fast steps are."""
    alone, _ = answers(engine, "off", GREEDY)
    guessed, stats = answers(engine, 4, GREEDY)
    for (tokens, _), (expected, _) in zip(guessed, alone, strict=True):
        assert same(tokens, expected)
    assert stats["drafted"] >= stats["accepted"] > 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_guessed_rows_are_those_of_single_steps(family, tmp_path) -> None:
    """Of heads in groups, windows and latents, by one call of C a layer."""
    save(Case(family, "plain"), tmp_path)
    source, device = open_model(tmp_path), CpuDevice()
    backbone = Backbone(source, model_spec(source.config), Precision("f32", device), 96)
    kv, probing = KVCache(backbone.spec, torch.float32, torch.device("cpu"), 200), backbone.router
    tokens, single = [3, 9, 4, 7], []

    def run(sequence: SequenceKV, new: list[int], drafted: int, wanted: Any) -> list[np.ndarray]:
        inputs = [StepInput(TokenSpan(sequence, new, drafted), wanted)]
        found = through(EagerLayers(backbone, [inputs[0].span], probing), backbone, inputs, False)
        sequence.advance(len(new) - drafted)
        return found

    sequences = [kv.allocate(90) for _ in range(2)]
    for sequence in sequences:
        run(sequence, list(range(60)), 0, "none")
    for token in tokens:
        single.append(run(sequences[0], [token], 0, "last"))
    together = run(sequences[1], tokens, len(tokens) - 1, "last")
    for rows, each in zip(together, zip(*single, strict=True), strict=True):
        np.testing.assert_allclose(rows, np.concatenate(each), rtol=1e-4, atol=1e-5)
    assert sequences[1].length == 61
    device.close()


def test_draft_follows_the_longest_match() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    draft = Draft(tokens)
    draft.follow()
    assert draft.tokens(3) == [4, 9, 2]  # behind 1 2 3, though 2 3 stands later
    for token in (4, 9, 2, 3):
        before = draft.chances(1)
        tokens.append(token)
        draft.follow()
        assert draft.chances(1) > before
    assert draft.tokens(20)[:12] == [5, 8, 1, 2, 3, 4, 9, 2, 3, 5, 8, 1]  # goes on with itself
    chance = draft.chances(1)
    tokens += [7, 1, 2]
    draft.follow()
    assert draft.tokens(2) == [3, 4]
    assert draft.chances(1) < chance


def test_guesses_are_chosen_by_what_their_steps_cost() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.note(1, 0, 0.010)
    assert costs.multiples(1, 3) == pytest.approx([1, 2**OVERLAP, 3**OVERLAP, 4**OVERLAP])
    sure, likely, doubtful = [1.0] * 3, [0.7, 0.5, 0.2], [0.4, 0.2]
    assert best_numbers([sure], costs, MOST) == [3]
    assert best_numbers([likely], costs, MOST) == [0]
    for guesses, seconds in ((1, 0.011), (2, 0.013), (3, 0.030), (2, 0.013), (2, 0.013)):  # as measured
        for _ in range(3):
            costs.note(1, guesses, seconds)
    assert costs.multiples(1, 3) == pytest.approx([1, 1.1, 1.3, 1.45])
    assert best_numbers([sure], costs, MOST) == [3]
    assert best_numbers([likely], costs, MOST) == [2]
    assert best_numbers([doubtful], costs, MOST) == [1]
    assert best_numbers([[(GAIN * 1.1 - 1) * 0.9]], costs, MOST) == [0]
    for _ in range(3):
        costs.note(2, 0, 0.012)
        costs.note(2, 1, 0.013)
    assert best_numbers([doubtful, sure], costs, 1) == [0, 1]


def test_a_step_without_guesses_is_measured_now_and_then() -> None:
    costs = StepCosts()
    assert costs.stale(1)
    for _ in range(3):
        costs.note(1, 0, 0.010)
    noted = 0
    while not costs.stale(1):
        costs.note(1, 4, 0.015)
        noted += 1
    costs.note(1, 0, 0.010)
    assert noted > 9
    assert not costs.stale(1)
