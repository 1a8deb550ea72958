"""Requests with a grammar on a real engine: a row without its mask sits steps out, and others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from embedded_tokenizer import embedded_tokenizer
from msgspec.structs import replace
from test_scheduler import CONTEXT, Harness
from thread_engine import engine_in_threads

from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling.drafts import Draft
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

    def __init__(self, engine: Any, tokenizer: Tokenizer, **options: Any) -> None:
        self.asked: list[MaskRequest] = []
        self.dropped: list[int] = []
        self.grammars = Grammars(tokenizer)
        self._known: dict[int, int] = {}
        super().__init__(engine, 4 * CONTEXT, slots=4, decoder=tokenizer.decoder, ask=self._ask, **options)

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
            tokens = tuple(wanted.tokens[wanted.start + (known or 0) : wanted.end])
            self._known[wanted.answer] = wanted.end - wanted.start
            grammar = "" if known else wanted.grammar
            ahead = wanted.ahead, tuple(wanted.guesses)
            asked = Follow(wanted.answer, wanted.vocabulary, tokens, grammar, b"", *ahead)
            wanted.give((self.grammars.follow if known else self.grammars.compile)(asked))

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


def with_grammar(
    request: int, tokenizer: Tokenizer, seed: int = 1, temperature: float = 1.0, prompt: Any = PROMPT
) -> Generate:
    from llguidance import LLMatcher

    grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    sampling = Sampling(temperature=temperature, seed=seed)
    return Generate(
        request, token_ids=prompt, max_tokens=40, sampling=sampling, shaping=Shaping(grammar=grammar)
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


@pytest.mark.parametrize("speculate", ["off", 4])
def test_a_grammar_that_ends_with_the_last_token_ends_by_length(
    engine: Any, tokenizer: Tokenizer, speculate: Any
) -> None:
    """With guesses as without, and where only the Done is missing: it does not matter whether it is known
    that nothing may follow."""
    prompt = tuple(tokenizer.encode('["red","blue"]'))
    whole = Rounds(engine, tokenizer)
    whole.scheduler.enqueue(b"c", with_grammar(0, tokenizer, 0, 0.0, prompt))
    whole.finish()
    had = tuple(whole.tokens(0))
    for most, resume, reason in (
        (len(had) - 1, (), "length"),
        (len(had), (), "length"),
        (len(had), had, "length"),
        (len(had) + 1, (), "stop"),
    ):
        message = with_grammar(0, tokenizer, 0, 0.0, prompt)
        rounds = Rounds(engine, tokenizer, speculate=speculate)
        rounds.scheduler.enqueue(b"c", replace(message, max_tokens=most, resume=resume))
        rounds.finish()
        assert rounds.done(0).reason == reason, (most, len(resume))  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_guesses_within_a_grammar_change_no_token(
    engine: Any, tokenizer: Tokenizer, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the grammar forces comes true, what the text has said before may, what it forbids is not computed,
    and a second request beside them has its own."""
    prompt = tuple(tokenizer.encode('["red","blue"]'))

    def answers(speculate: Any) -> tuple[list[list[int]], dict[str, Any], int]:
        rounds = Rounds(engine, tokenizer, speculate=speculate)
        for request in (0, 1):
            message = with_grammar(request, tokenizer, request, temperature, prompt)
            rounds.scheduler.enqueue(b"c", message)
        rounds.finish()
        given = [Harness.answer(rounds, request) for request in (0, 1)]
        assert [done.reason for _, done in given] == ["stop", "stop"]
        rounds.check_empty()
        stats = rounds.scheduler.speculation.stats()
        return [[token.token for token in tokens] for tokens, _ in given], stats, len(rounds.dropped)

    expected, stats, _ = answers("off")
    assert stats["drafted"] == 0
    found, stats, dropped = answers(4)
    assert (found, dropped) == (expected, 2)
    assert stats["drafted"] >= stats["accepted"] > 0
    monkeypatch.setattr(Draft, "tokens", lambda self, most: [5] * most)  # which the schema has nowhere
    monkeypatch.setattr(Draft, "chances", lambda self, most: [1.0] * most)
    found, stats, _ = answers(4)
    assert found == expected
    assert stats["drafted"] == stats["accepted"] > 0
