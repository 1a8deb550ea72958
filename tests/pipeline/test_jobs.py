"""Jobs and their factory without an engine: a script gives the logits, and the test's clock the seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from clock import Clock
from expected_errors import expect_error
from msgspec.structs import replace
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.step import greedy as device_choice
from pipeline.errors import RequestError
from pipeline.models.registry import model_spec
from pipeline.scheduling import job_factory, jobs
from pipeline.scheduling.job_factory import JobFactory
from pipeline.text.detokenizer import RunDecoder, StopStrings, TextStream
from pipeline.text.logprobs import MOST, log_softmax
from pipeline.text.sampler import Sampler
from protocol.codec import decode, encode
from protocol.messages import (
    ChatMessage,
    Done,
    Generate,
    Queued,
    Sampling,
    Score,
    Scores,
    Shaping,
    Token,
    TokenBias,
)

VOCABULARY, CONTEXT, END, MARK = 128, 20, 127, 126
PROMPT = (1, 2, 3)


class Letters:
    """A tokenizer of ASCII letters that are byte-fallback tokens: no text is certain before the answer ends.
    With `certain`, each letter is."""

    def __init__(self, certain: bool = False) -> None:
        self.certain = certain

    def stream(self, stop: Sequence[str], *, marks: bool = False) -> TextStream:
        decoder = RunDecoder(lambda ids: bytes(ids).decode(), lambda token: not self.certain)
        spelled = {MARK: "<mark>"} if marks else {}
        return TextStream(decoder, StopStrings(stop), MARK.__eq__, spelled)


@pytest.fixture
def clock(clock, monkeypatch) -> Clock:
    monkeypatch.setattr(jobs, "time", clock)
    return clock


def factory(tokenizer: object = None, seed: int = 0, *, greedy: bool = False) -> JobFactory:
    limits = {"vocabulary": VOCABULARY, "context": CONTEXT, "longest": CONTEXT}
    return JobFactory(tokenizer, frozenset({END}), print, **limits, seed=seed, greedy=greedy)


def sequence(capacity: int = CONTEXT, switch: int | None = None) -> SequenceKV:
    made = SequenceKV(KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), capacity), switch, [])
    made.grow(capacity)
    return made


def row(token: int) -> np.ndarray:
    """Logits with this best token, and the next one 1.5 behind it."""
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, token], logits[0, (token + 1) % VOCABULARY] = 5.0, 3.5
    return logits


def step(job: jobs.Job, token: int, chunk: int = 4) -> list[int]:
    """One step of a job; returns its input."""
    given = job.step_input(chunk)
    assert job.kv is given.span.kv
    job.kv.advance(len(given.span.tokens))
    wanted = {"none": 0, "last": 1, "greedy": 1, "all": len(given.span.tokens)}[given.logits]
    logits = np.repeat(row(token), wanted, axis=0)
    job.take_logits(device_choice(torch.from_numpy(logits)).numpy() if given.logits == "greedy" else logits)
    return list(given.span.tokens)


def answer(message: Generate, script: str, tokenizer: object) -> tuple[list[Token], Done]:
    """An admitted request's messages, with these letters as the model's answer, to its end."""
    sent: list = []
    job = factory(tokenizer).generate(b"c", message, sent.append)
    job.admit(sequence(), 0, {})
    letters = iter(script.encode())
    while job.reason is None:
        step(job, next(letters), chunk=CONTEXT)
    assert next(letters, None) is None, "the answer has ended early"
    job.finish(job.reason, {})
    *tokens, done = sent
    assert isinstance(done, Done)
    return tokens, done


PLAIN = Generate(0, token_ids=PROMPT, max_tokens=4)


@pytest.mark.parametrize(
    ("message", "small"),
    [
        (PLAIN, True),
        (replace(PLAIN, stop=("c",)), True),
        (replace(PLAIN, rival=9), False),
        (replace(PLAIN, logprobs=2), False),
        (replace(PLAIN, sampling=Sampling(0.5)), False),
        (replace(PLAIN, sampling=Sampling(0.0, repetition_penalty=1.1)), False),
        (replace(PLAIN, shaping=Shaping(presence_penalty=0.5)), False),
        (replace(PLAIN, shaping=Shaping(bias=(TokenBias(3, 1.0),))), False),
    ],
)
def test_choices_of_the_device_leave_the_same_messages(message, small) -> None:
    """Only where nothing but the largest logit is asked for, the device chooses."""
    sent: dict[bool, list] = {False: [], True: []}
    for greedy in sent:
        job = factory(Letters(certain=True), greedy=greedy).generate(b"c", message, sent[greedy].append)
        job.admit(sequence(), 0, {})
        given = job.step_input(CONTEXT)
        assert given.logits == ("greedy" if greedy and small else "last")
        while job.reason is None:
            step(job, ord("a") + len(sent[greedy]))
        job.finish(job.reason, {})
    assert sent[True][:-1] == sent[False][:-1]
    assert sent[True][-1].reason == sent[False][-1].reason


@pytest.mark.parametrize(
    ("stop", "reason", "text"), [((), "length", "abc"), (("bc",), "stop", "a"), (("cd",), "length", "abc")]
)
def test_stop_string_in_text_that_only_the_end_makes_certain(stop, reason, text) -> None:
    tokens, done = answer(Generate(7, token_ids=PROMPT, max_tokens=3, stop=stop), "abc", Letters())
    assert [(t.request, t.index, t.token, t.text) for t in tokens] == [
        (7, i, letter, "") for i, letter in enumerate(b"abc")
    ]
    assert (done.request, done.reason, done.text) == (7, reason, text)


@pytest.mark.parametrize("settings", [{}, {"rival": 9}, {"sampling": Sampling(1.0, seed=1)}])
def test_tokens_that_a_model_excludes_leave_messages_of_finite_numbers(settings) -> None:
    sent: list = []
    job = factory(Letters()).generate(
        b"c", Generate(0, token_ids=PROMPT, max_tokens=9, **settings), sent.append
    )
    job.admit(sequence(), 0, {})
    for token in (7, END):
        given = job.step_input(CONTEXT)
        job.kv.advance(len(given.span.tokens))
        logits = np.full((1, VOCABULARY), -np.inf, np.float32)
        logits[0, token] = 2.0
        job.take_logits(logits)
    job.finish(job.reason, {})
    token, done = (decode(encode(message)) for message in sent)
    margins = token.margin, done.stats["end"]["margin"]
    assert (token.token, done.reason, margins) == (7, "stop", (MOST, MOST))


def test_cancelled_answer_stays_cancelled_whatever_its_held_text() -> None:
    sent: list = []
    message = Generate(0, token_ids=PROMPT, max_tokens=9, stop=("b",))
    job = factory(Letters()).generate(b"c", message, sent.append)
    job.admit(sequence(), 0, {})
    for letter in b"ab":
        step(job, letter)
    job.finish("cancelled", {"policy": "p"}, error="why")
    assert (sent[-1].reason, sent[-1].text, sent[-1].error) == ("cancelled", "a", "why")
    assert sent[-1].stats["policy"] == "p"


def test_answer_s_messages_have_text_margin_and_end_token() -> None:
    message = Generate(0, token_ids=PROMPT, max_tokens=5, stop=("xy",))
    tokens, done = answer(message, "ab\x7f", Letters(certain=True))
    assert [(t.token, t.text, t.margin, t.runner_up) for t in tokens] == [
        (ord("a"), "a", 1.5, ord("b")),
        (ord("b"), "b", 1.5, ord("c")),
    ]
    assert (done.reason, done.stats["end"]) == ("stop", {"token": END, "margin": 1.5, "runner_up": 0})
    tokens, done = answer(
        Generate(0, token_ids=PROMPT, max_tokens=3, ignore_eos=True), "a\x7fb", Letters(True)
    )
    assert ([t.token for t in tokens], done.reason, "end" in done.stats) == ([97, END, 98], "length", False)


def test_stats_are_of_the_first_admission_and_of_each_phase(clock: Clock) -> None:
    """The request waits 2 s and is preempted once; its prompt has 5 tokens, 2 of them from an earlier
    request."""
    sent: list = []
    job = factory().generate(b"c", Generate(3, token_ids=(1, 2, 3, 4, 5), max_tokens=4), sent.append)
    job.report_position(2)
    job.report_position(2)  # unchanged
    job.report_position(1)
    clock.now += 2
    kv = sequence()
    kv.advance(2)
    job.admit(kv, 6, {"before": 1})
    assert (job.admission, job.reused, job.counters_before, job.prefilling) == (6, 2, {"before": 1}, True)
    assert step(job, 9, chunk=2) == [3, 4]
    job.count_step("prefill", 2, 1.0)
    clock.now += 3
    assert step(job, 9, chunk=2) == [5]
    job.count_step("prefill", 1, 0.5)
    assert step(job, 10) == [9]
    job.count_step("decode", 1, 0.25)
    assert (job.preempt(), job.kv, job.filled) == (kv, None, 0)
    job.report_position(1)  # again, because it waits again
    clock.now += 5
    job.admit(sequence(), 9, {"before": 2})
    assert (job.admission, job.reused, job.counters_before) == (6, 2, {"before": 1})
    assert step(job, 11, chunk=9) == [1, 2, 3, 4, 5, 9, 10]
    job.count_step("prefill", 7, 0.5)
    assert step(job, 12) == [11]
    job.count_step("decode", 1, 0.25)
    assert job.reason == "length"
    job.finish("length", {"own": 5})
    assert [m.position for m in sent if isinstance(m, Queued)] == [2, 1, 1]
    assert [(m.index, m.token) for m in sent if isinstance(m, Token)] == list(enumerate((9, 10, 11, 12)))
    assert sent[-1].stats == {
        "prompt_tokens": 5,
        "kv_reused_tokens": 2,
        "decode_tokens": 2,
        "guessed_tokens": 0,
        "accepted_tokens": 0,
        "queued_s": 2.0,
        "prefill_s": 2.0,
        "decode_s": 0.5,
        "prefill_tok_s": 5.0,
        "decode_tok_s": 4.0,
        "first_token_s": 5.0,
        "preemptions": 1,
        "own": 5,
    }


def test_tokens_of_the_other_rotary_embedding_are_prefilled_again() -> None:
    """Beyond 5 tokens this model has another one: what was cached is dropped."""
    job = factory().generate(b"c", Generate(0, token_ids=PROMPT, max_tokens=9), lambda message: None)
    job.admit(sequence(switch=5), 0, {})
    assert [step(job, 9), step(job, 9), step(job, 9)] == [[1, 2, 3], [9], [9]]
    assert (job.prefilling, job.filled) == (True, 0)
    assert [step(job, 9), step(job, 9), step(job, 9)] == [[1, 2, 3, 9], [9, 9], [9]]
    long = factory().generate(b"c", Generate(0, token_ids=PROMPT * 2), lambda message: None)
    kv = sequence(switch=5)
    long.admit(kv, 0, {})
    assert kv.long  # before its first step


@pytest.mark.parametrize("full", [False, True])
def test_score_sends_blocks_of_every_row(full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_factory, "BLOCK_BYTES", 2 * 4 * VOCABULARY + 3)  # two rows
    sent: list[Scores] = []
    tokens = (10, 11, 12, 13, 14, 15)
    message = Score(4, token_ids=tokens, stepwise=True, prefill=5, full=full)
    job = factory().score(b"c", message, sent.append)
    job.admit(sequence(), 0, {})
    rows = np.random.default_rng(0).normal(size=(6, VOCABULARY)).astype(np.float32)
    for chunk in ([0, 1, 2], [3, 4], [5]):
        assert job.reason is None
        given = job.step_input(3)
        assert (list(given.span.tokens), given.logits) == ([tokens[i] for i in chunk], "all")
        job.kv.advance(len(chunk))
        job.take_logits(rows[chunk])
    assert job.reason == "stop"
    assert [(m.request, m.start, m.tokens.tolist()) for m in sent] == [
        (4, 0, [10, 11]), (4, 2, [12]), (4, 3, [13, 14]), (4, 5, [15]),
    ]  # fmt: skip
    expected = log_softmax(rows)
    chosen = np.concatenate([m.chosen for m in sent])
    assert np.array_equal(chosen, expected[np.arange(5), tokens[1:]])
    if full:
        assert np.array_equal(np.concatenate([m.logprobs for m in sent]), expected)
    else:
        assert {m.logprobs.shape for m in sent} == {(0, 0)}


# --- the factory ------------------------------------------------------------------------------------------


def test_requests_without_a_seed_have_consecutive_ones() -> None:
    """Beginning with the engine's; a request's own seed, 0 too, uses none of them up."""
    made, sampling = factory(seed=5), Sampling(temperature=1.0)
    logits = np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32)

    def first_token(seed: int | None) -> int:
        sent: list = []
        given = Sampling(temperature=1.0, seed=seed)
        message = Generate(0, token_ids=PROMPT, sampling=given, ignore_eos=True)
        job = made.generate(b"c", message, sent.append)
        job.admit(sequence(), 0, {})
        job.step_input(9)
        job.take_logits(logits)
        return sent[0].token

    drawn = [Sampler(sampling, seed).next(logits[0], []) for seed in (5, 6, 0, 7)]
    assert len(set(drawn)) == 4
    assert [first_token(seed) for seed in (None, None, 0, None)] == drawn


ASKED, SCORED, TURN = Generate(0, token_ids=PROMPT), Score(0, token_ids=PROMPT), ChatMessage("user", "x")
LIMITS = [  # a message, one of its fields, a value that it may just have, one that is refused, and why
    (ASKED, "token_ids", (1,) * (CONTEXT - 1), (1,) * CONTEXT, "has 20 tokens, the context is 20, including"),
    (ASKED, "token_ids", (0, VOCABULARY - 1), (5, -1), "token id -1 is outside"),
    (ASKED, "max_tokens", 1, 0, "max_tokens must be at least 1, it is 0"),
    (
        replace(ASKED, max_tokens=4),
        "resume",
        (9,) * 4,
        (9,) * 5,
        "has 5 tokens, the answer can have 4 at most",
    ),
    (
        replace(ASKED, max_tokens=99),
        "resume",
        (9,) * 17,
        (9,) * 18,
        "has 18 tokens, the answer can have 17 at",
    ),
    (ASKED, "resume", (0,), (VOCABULARY,), "token id 128 is outside the vocabulary of 128"),
    (ASKED, "sampling", Sampling(temperature=0.0), Sampling(temperature=-1.0), "temperature is -1.0"),
    (SCORED, "token_ids", (0,), (VOCABULARY,), "token id 128 is outside"),
    (SCORED, "token_ids", (1,) * CONTEXT, (1,) * (CONTEXT + 1), "the text has 21 tokens"),
    (replace(SCORED, stepwise=True), "prefill", 3, 4, r"prefill must be in 1\.\.3, it is 4"),
    (Score(0, token_ids=(97,)), "prefill", 1, 0, r"prefill must be in 1\.\.1, it is 0"),
]


def submitted(message: Generate | Score, tokenizer: Letters) -> jobs.Job:
    made = factory(tokenizer)
    make = made.generate if isinstance(message, Generate) else made.score
    return make(b"c", message, lambda answer: None)


@pytest.mark.parametrize(("message", "field", "good", "bad", "reason"), LIMITS)
def test_limits_of_a_request(message, field, good, bad, reason) -> None:
    assert submitted(replace(message, **{field: good}), Letters()).max_kv_tokens <= CONTEXT
    expect_error(RequestError, submitted, replace(message, **{field: bad}), Letters(), match=reason)
