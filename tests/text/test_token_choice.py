"""Penalties, biases and grammars before a token is sampled, and what is reported of a model's own logits."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.assets import model_dir
from pipeline.errors import PipelineError, RequestError
from pipeline.text.generation_defaults import validate_shaping
from pipeline.text.grammar import GrammarCompiler, check_grammar
from pipeline.text.logprobs import log_softmax, top_logprobs, top_of_rows
from pipeline.text.sampler import Sampler
from pipeline.text.token_choice import TokenChooser
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import Sampling, Shaping, TokenBias

GREEDY = Sampling()


def chooser(shaping: Shaping, *, prompt: int = 0, logprobs: int = -1) -> TokenChooser:
    return TokenChooser(Sampler(GREEDY, 0), shaping, prompt=prompt, logprobs=logprobs)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 7), max_size=12),
    st.lists(st.integers(0, 7), max_size=4),
    st.floats(-2, 2, width=16),
    st.floats(-2, 2, width=16),
    st.dictionaries(st.integers(0, 7), st.floats(-4, 4, width=16), max_size=3),
)
def test_logits_are_changed_as_the_formula_says(
    answer: list[int], prompt: list[int], presence: float, frequency: float, biases: dict[int, float]
) -> None:
    logits = np.linspace(1, -1, 8).astype(np.float32)[np.random.default_rng(1).permutation(8)]
    shaping = Shaping(presence, frequency, tuple(TokenBias(*pair) for pair in biases.items()))
    chosen = chooser(shaping, prompt=len(prompt)).next(logits, [*prompt, *answer])
    wanted = [
        logits[token]
        - presence * (token in answer)
        - frequency * answer.count(token)
        + biases.get(token, 0.0)
        for token in range(8)
    ]
    assert wanted[chosen.token] == pytest.approx(max(wanted), abs=1e-5)
    assert chosen.margin == pytest.approx(float(np.sort(logits)[-1] - np.sort(logits)[-2]))  # before them


def test_counts_grow_with_the_answer_and_resume_as_they_were() -> None:
    logits = np.array([1.0, 0.9, 0.2], np.float32)
    shaping = Shaping(frequency_penalty=0.08)
    first, tokens = chooser(shaping, prompt=1), [0]
    for _ in range(20):
        tokens.append(first.next(logits, tokens).token)
    assert tokens[1:5] == [0, 0, 1, 0]
    assert chooser(shaping, prompt=1).next(logits, tokens).token == first.next(logits, tokens).token


def test_reported_probabilities_are_the_models_own() -> None:
    logits = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    wanted = log_softmax(logits[None])[0]
    choice = chooser(Shaping(bias=(TokenBias(7, 50.0),)), logprobs=3).next(logits, [])
    assert choice.token == 7
    assert choice.logprob == pytest.approx(float(wanted[7]), abs=1e-5)
    assert choice.top_tokens == tuple(np.argsort(-wanted, kind="stable")[:3])
    assert choice.top_logprobs == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-5)
    assert top_logprobs(logits, 1, 0)[1] == ()
    ids, values = top_of_rows(wanted[None], 2)
    assert ids[0].tolist() == list(choice.top_tokens[:2])
    assert values[0] == pytest.approx(choice.top_logprobs[:2], abs=1e-5)
    assert top_of_rows(wanted[None], 0)[0].shape == (1, 0)


@pytest.mark.parametrize(
    ("shaping", "logprobs", "word"),
    [
        (Shaping(presence_penalty=1e9), -1, "presence_penalty"),
        (Shaping(frequency_penalty=-1e9), -1, "frequency_penalty"),
        (Shaping(bias=(TokenBias(1, 1e9),)), -1, "bias"),
        (Shaping(bias=(TokenBias(1, 1.0),) * 5000), -1, "biases"),
        (Shaping(), 1000, "logprobs"),
        (Shaping(), -2, "logprobs"),
    ],
)
def test_values_that_cannot_be_served(shaping: Shaping, logprobs: int, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        validate_shaping(shaping, logprobs)


# --- grammars ---------------------------------------------------------------------------------------------

VOCABULARY = 4096
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("llguidance", reason="of the extra `serve`")
    found = Tokenizer.load(model_dir())
    assert found is not None
    return found


def schema_grammar() -> str:
    from llguidance import LLMatcher

    return str(
        LLMatcher.grammar_from_json_schema(
            json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
        )
    )


def write(compiler: GrammarCompiler, grammar: str, seed: int, resume: list[int] | None = None) -> list[int]:
    """Tokens of an answer that follows the grammar, drawn from nearly uniform logits."""
    random = np.random.default_rng(seed)
    tokens = list(resume or [])
    shaped = TokenChooser(
        Sampler(Sampling(temperature=1.0), seed, drawn=len(tokens)),
        Shaping(grammar=grammar),
        prompt=0,
        grammar=compiler.start(grammar, tokens),
    )
    logits = random.normal(size=(200, VOCABULARY)).astype(np.float32)
    while len(tokens) < 150:
        token = shaped.next(logits[len(tokens)], tokens).token
        if token in (1, 6):
            break
        tokens.append(token)
        shaped.accept(token)
        if shaped.complete:
            break
    return tokens


def test_whatever_is_drawn_follows_the_schema(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [1, 6])
    written = [write(compiler, schema_grammar(), seed) for seed in range(6)]
    for tokens in written:
        found = json.loads(tokenizer.decode(tokens))
        assert isinstance(found["a"], int)
        assert found["b"] in ("x", "y")
    assert len({tuple(tokens) for tokens in written}) > 1
    # an answer that is continued elsewhere goes on in the same place
    assert write(compiler, schema_grammar(), 3, written[3][:4]) == written[3]


def test_a_request_waits_for_its_grammar_without_holding_up_others(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [1])
    grammar = compiler.start(schema_grammar(), [])
    until = time.monotonic() + 20
    while not grammar.ready and time.monotonic() < until:
        time.sleep(0.01)
    assert grammar.ready
    allowed = grammar.allowed()
    assert {tokenizer.decode([token])[0] for token in np.flatnonzero(allowed)} == {"{"}


def test_a_grammar_that_nothing_can_follow_ends_with_a_line(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [1])
    grammar = compiler.start(schema_grammar(), [5, 5])  # no beginning of an object
    with pytest.raises(PipelineError, match="grammar"):
        grammar.allowed()


@pytest.mark.parametrize("grammar", ['{"grammars": 1}', "start: nowhere", 'start: "a', "start: /(/"])
def test_what_is_no_grammar_is_refused(tokenizer: Tokenizer, grammar: str) -> None:
    with pytest.raises(RequestError, match="grammar"):
        check_grammar(grammar)
