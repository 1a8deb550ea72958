"""Requests with a grammar on a real engine: a row without its mask sits steps out, and others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from embedded_tokenizer import embedded_tokenizer
from test_scheduler import CONTEXT, Harness
from thread_engine import engine_in_threads

from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.text.grammar import Grammars, MaskDropped, MaskRequest
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import Done, Follow, Generate, Sampling, Shaping

PROMPT = tuple(range(3, 15))
SCHEMA = {
    "type": "array",
    "items": {"enum": ["red", "blue"]},
    "minItems": 4,
    "maxItems": 6,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory) -> Iterator[Any]:
    with engine_in_threads(tiny_model, tmp_path_factory.mktemp("s")) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("all-host", {}), 1), None)
        yield engine


class Rounds(Harness):
    """A scheduler whose masks a test makes."""

    def __init__(self, engine: Any, tokenizer: Tokenizer) -> None:
        self.asked: list[MaskRequest] = []
        self.dropped: list[int] = []
        self.grammars = Grammars(tokenizer)
        self._known: dict[int, int] = {}
        super().__init__(engine, 4 * CONTEXT, slots=4, decoder=tokenizer.decoder, ask=self._ask)

    def _ask(self, wanted: MaskRequest | MaskDropped) -> None:
        if isinstance(wanted, MaskDropped):
            self.dropped.append(wanted.answer)
        else:
            self.asked.append(wanted)

    def answer(self) -> None:
        """Make all masks that were asked for."""
        while self.asked:
            wanted = self.asked.pop(0)
            known = self._known.get(wanted.answer)
            tokens = tuple(wanted.tokens[wanted.start + (known or 0) :])
            self._known[wanted.answer] = len(wanted.tokens) - wanted.start
            asked = Follow(wanted.answer, wanted.vocabulary, tokens, "" if known else wanted.grammar)
            wanted.allowed = (self.grammars.follow if known else self.grammars.compile)(asked)

    def tokens(self, request: int) -> list[int]:
        return [m.token for m in self.answered(request)]

    def done(self, request: int) -> Done | None:
        return next((m for m in self.to(b"c", Done) if m.request == request), None)

    def finish(self, every: int = 1) -> None:
        """Rounds to the end of all requests, with masks after each `every` of them."""
        for number in range(2000):
            if self.scheduler.idle:
                return
            self.scheduler.round()
            if number % every == 0:
                self.answer()
        raise AssertionError("not idle")


def with_grammar(request: int, tokenizer: Tokenizer, seed: int = 1) -> Generate:
    from llguidance import LLMatcher

    grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    sampling = Sampling(temperature=1.0, seed=seed)
    return Generate(
        request, token_ids=PROMPT, max_tokens=40, sampling=sampling, shaping=Shaping(grammar=grammar)
    )


def plain(request: int, count: int = 10) -> Generate:
    return Generate(request, token_ids=PROMPT, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(engine: Any, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of `with_grammar` and `plain`, each alone."""
    answers = []
    for message in (with_grammar(0, tokenizer), plain(0)):
        rounds = Rounds(engine, tokenizer)
        rounds.scheduler.enqueue(b"c", message)
        rounds.finish()
        answers.append(rounds.tokens(0))
    words = json.loads(tokenizer.decoder.decode(answers[0]))
    assert 4 <= len(words) <= 6
    assert set(words) <= {"red", "blue"}
    return answers[0], answers[1]


def test_a_row_without_its_mask_sits_steps_out(engine: Any, tokenizer: Tokenizer, reference: Any) -> None:
    rounds = Rounds(engine, tokenizer)
    rounds.scheduler.enqueue(b"c", with_grammar(0, tokenizer))
    rounds.scheduler.enqueue(b"c", plain(1))
    while rounds.done(1) is None:
        assert rounds.scheduler.round()
    assert rounds.tokens(1) == reference[1]
    assert rounds.tokens(0) == []
    assert not rounds.scheduler.round()  # nothing can go on: the engine waits for its inbox
    rounds.finish(every=3)
    assert rounds.tokens(0) == reference[0]
    assert rounds.done(0) is not None
    assert len(rounds.dropped) == 1


def test_a_waiting_row_can_be_preempted_and_cancelled(
    engine: Any, tokenizer: Tokenizer, reference: Any
) -> None:
    rounds = Rounds(engine, tokenizer)
    for message in (with_grammar(0, tokenizer), with_grammar(1, tokenizer)):
        rounds.scheduler.enqueue(b"c", message)
    while len(rounds.tokens(0)) < 5:
        rounds.scheduler.round()
        rounds.answer()
    rounds.scheduler.round()  # with logits, and before the mask that it asked for
    job = next(job for job in rounds.scheduler._running if job.request == 0)
    assert not job.ready
    rounds.scheduler._preempt(job)
    rounds.scheduler.cancel(b"c", 1)
    assert len(rounds.dropped) == 2
    rounds.finish()
    assert rounds.tokens(0) == reference[0]
    assert rounds.done(1).reason == "cancelled"  # type: ignore[union-attr]
    assert len(rounds.dropped) == 3
