"""Requests with a rival, a reserve or a resumed answer, and the remedies that a refusal names."""

from __future__ import annotations

import numpy as np
import pytest
from expected_errors import expect_error
from test_jobs import CONTEXT, END, MARK, PROMPT, VOCABULARY, Letters, factory, sequence, step

from pipeline.errors import PromptTooLong, RequestError
from pipeline.scheduling.job_factory import JobFactory
from pipeline.text.sampler import Sampler
from protocol.messages import Generate, Sampling, Score, Token


def made(message: Generate, sent: list, tokenizer: Letters | None = None):
    job = factory(tokenizer).generate(b"c", message, sent.append)
    job.admit(sequence(), 0, {})
    return job


@pytest.mark.parametrize(
    ("rival", "runner_up", "margin"), [(-1, 10, 1.5), (10, 10, 1.5), (0, 0, 5.0), (9, 9, 0.0)]
)
def test_margin_is_measured_against_the_rival(rival: int, runner_up: int, margin: float) -> None:
    """Of logits in which token 9 is the best, 1.5 before token 10 and 5 before all others."""
    sent: list = []
    step(made(Generate(0, token_ids=PROMPT, rival=rival), sent), 9)
    assert sent == [Token(0, 0, 9, "", margin, runner_up)]


@pytest.mark.parametrize(
    ("reserve", "longest", "answer"),
    [
        (-3, 19, "the answer"),
        (0, 19, "the answer"),
        (1, 19, "the answer"),
        (2, 18, "2 tokens of an answer"),
        (19, 1, "19 tokens of an answer"),
    ],
)
def test_prompt_leaves_the_reserve_for_the_answer(reserve: int, longest: int, answer: str) -> None:
    job = made(Generate(0, token_ids=(1,) * longest, reserve=reserve), [])
    assert (job.prompt_length, job.max_kv_tokens) == (longest, CONTEXT)
    with pytest.raises(PromptTooLong) as refused:
        made(Generate(0, token_ids=(1,) * (longest + 1), reserve=reserve), [])
    assert str(refused.value) == (
        f"the prompt has {longest + 1} tokens, the context is {CONTEXT}, including {answer}; shorten it"
    )
    assert refused.value.tokens == longest + 1


@pytest.mark.parametrize(
    ("longest", "remedy"),
    [(CONTEXT, "shorten it"), (CONTEXT + 1, "shorten it or start the engine with a larger --context")],
)
def test_larger_context_is_a_remedy_where_the_model_has_one(longest: int, remedy: str) -> None:
    ends = frozenset({END})
    jobs = JobFactory(Letters(), ends, print, vocabulary=VOCABULARY, context=CONTEXT, longest=longest, seed=0)
    for make, message in (
        (jobs.generate, Generate(0, token_ids=(1,) * CONTEXT)),
        (jobs.score, Score(0, token_ids=(1,) * (CONTEXT + 1))),
    ):
        with pytest.raises(RequestError) as refused:
            make(b"c", message, print)
        assert str(refused.value).endswith(f"; {remedy}")


def test_resumed_answer_draws_the_numbers_behind_its_tokens() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    logits = np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32)
    drawn = []
    for resume in ((), (20,), (20, 21)):
        sent: list = []
        job = made(Generate(0, token_ids=PROMPT, sampling=sampling, resume=resume, ignore_eos=True), sent)
        given = job.step_input(CONTEXT)
        assert list(given.span.tokens) == [*PROMPT, *resume]
        job.kv.advance(len(given.span.tokens))
        job.take_logits(logits)
        assert sent[0].index == len(resume)
        drawn.append(sent[0].token)
        assert drawn[-1] == Sampler(sampling, 3, drawn=len(resume)).next(logits[0], [])
    assert len(set(drawn)) == 3


def test_penalty_sees_the_prompt_and_the_answer() -> None:
    """Token 9 is the best of the next step too, unless it was in the prompt or the answer."""
    for prompt, best in (((1, 2), 9), ((1, 9), 10)):
        sent: list = []
        job = made(
            Generate(0, token_ids=prompt, sampling=Sampling(temperature=0.0, repetition_penalty=3.0)), sent
        )
        step(job, 9)
        step(job, 9)
        assert [m.token for m in sent] == [best, 19 - best]


def test_model_without_tokenizer_refuses_stop_strings() -> None:
    expect_error(RequestError, made, Generate(0, token_ids=PROMPT, stop=("x",)), [], match="need a tokenizer")


@pytest.mark.parametrize("marks", [True, False])
def test_marks_of_an_answer_have_a_text_where_they_are_asked_for(marks: bool) -> None:
    """All text before one is then certain, and so is what a stop string could have begun with."""
    sent: list = []
    job = made(Generate(0, token_ids=PROMPT, marks=marks, stop=("az",)), sent, Letters())
    for token in (ord("a"), MARK, ord("b")):
        step(job, token)
    job.finish("length", {})
    assert [message.text for message in sent] == (["", "a<mark>", "", "b"] if marks else ["", "", "", "ab"])
