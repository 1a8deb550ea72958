"""Grammars: what is drawn follows them, also where they are compiled again behind a part of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from embedded_tokenizer import embedded_tokenizer

from pipeline.errors import PipelineError, RequestError
from pipeline.gateway.bodies import Format
from pipeline.gateway.settings import Tools, grammar_of, json_schema, told
from pipeline.text.grammar import Grammar, Grammars, MaskDropped, MaskRequest, check_grammar
from pipeline.text.sampler import Sampler, TokenChooser
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import ChatMessage, Follow, Sampling, Shaping

VOCABULARY = 4096
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}

Accepts = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def schema(tokenizer: Tokenizer) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def accepts(tokenizer: Tokenizer) -> Accepts:
    """Returns whether a text follows a grammar and may end there."""
    from llguidance import LLMatcher

    made = tokenizer.for_grammars(VOCABULARY)

    def follows(grammar: str, text: str) -> bool:
        matcher = LLMatcher(made, grammar, log_level=0)
        return matcher.consume_tokens(tokenizer.encode_prompt(text)) and matcher.is_accepting()

    return follows


def test_json_has_no_white_space_but_single_spaces_behind_separators(accepts: Accepts) -> None:
    """Of a schema, and of the arguments of a call that is demanded."""
    plain = {name: value for name, value in SCHEMA.items() if name != "x-guidance"}
    call = Tools(schemas={"f": plain}, wanted=("f",), calls="json").grammar().text
    head = '<tool_call>\n{"name": "f", "arguments": '
    whole = json_schema(plain, "x").text
    for grammar, before, behind in ((whole, "", ""), (call, head, "}\n</tool_call>")):
        for text, follows in {
            '{"a":1,"b":"x"}': True,
            '{"a": 1, "b": "x"}': True,
            '{ "a":1,"b":"x"}': False,
            '{"a":  1,"b":"x"}': False,
            '{"a":1,\n"b":"x"}': False,
            '{"a":1,"b":"x" }': False,
        }.items():
            assert accepts(grammar, before + text + behind) is follows, text


def test_a_form_leaves_room_for_calls(accepts: Accepts) -> None:
    """An agent that wants its last answer in a form has tools for those before."""
    plain = {name: value for name, value in SCHEMA.items() if name != "x-guidance"}
    schemas = {"f": plain, "g": {}}
    form = '{"a": 1, "b": "x"}'
    call = f'<tool_call>\n{{"name": "f", "arguments": {form}}}\n</tool_call>'
    other = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        grammar = grammar_of(
            Format("json_schema", schema=plain), "x", Tools((), schemas, (), parallel, "json")
        )
        for text, follows in {
            form: True,
            call: True,
            f"{call}\n{other}": parallel,
            f"{form}{call}": False,
            '{"c": 1}': False,
            "I call f": False,
        }.items():
            assert accepts(grammar.text, text) is follows, text


def test_a_form_leaves_room_for_calls_of_any_text(accepts: Accepts) -> None:
    grammar = grammar_of(Format("json_object"), "x", Tools((), {"f": {}}, (), True, "xml"))
    for text, follows in {
        '{"a": 1}': True,
        "<tool_call>\n<function=f>\n<parameter=a>\n{1\n</parameter>\n</function>\n</tool_call>\n": True,
        '{"a": 1}<tool_call>': False,
        "I call <tool_call>": False,
    }.items():
        assert accepts(grammar.text, text) is follows, text


def test_a_form_is_told_where_calls_have_tokens_of_their_own() -> None:
    harmony = Tools((), {"f": {}}, (), True, "harmony")
    form = Format("json_schema", schema={"enum": ["yes"]})
    grammar = grammar_of(form, "text.format", harmony)
    assert not grammar
    user, system = ChatMessage("user", "a"), ChatMessage("system", "b")
    for turns, before in (((user,), ""), ((system, user), "b\n\n")):
        head, last = told(turns, grammar)
        assert (head.role, last) == ("system", user)
        assert head.content.startswith(before + "When you answer")
        assert head.content.endswith('{"enum": ["yes"]}')


class Answers:
    """Answers requests at once, as the event loop with the text process does. `restart`: before which mask
    the process is another one."""

    def __init__(self, tokenizer: Tokenizer, restart: int = -1) -> None:
        self.grammars = Grammars(tokenizer)
        self.asked = 0
        self._tokenizer = tokenizer
        self._restart = restart
        self._known: dict[int, int] = {}

    def __call__(self, wanted: MaskRequest | MaskDropped) -> None:
        if isinstance(wanted, MaskDropped):
            return self.grammars.drop(wanted.answer)
        if self.asked == self._restart:
            self.grammars, self._known = Grammars(self._tokenizer), {}
        self.asked += 1
        known = self._known.get(wanted.answer)
        tokens = tuple(wanted.tokens[wanted.start + (known or 0) : wanted.end])
        grammar = wanted.grammar if known is None else ""
        self._known[wanted.answer] = wanted.end - wanted.start
        asked = Follow(wanted.answer, wanted.vocabulary, tokens, grammar)
        wanted.give((self.grammars.compile if grammar else self.grammars.follow)(asked))
        return None


def write(answers: Answers, schema: str, seed: int, resume: list[int] | None = None) -> list[int]:
    """Tokens of an answer that follows the grammar, drawn from nearly uniform logits."""
    random = np.random.default_rng(seed)
    tokens = [9, 9, *(resume or [])]  # behind a prompt of two
    chooser = TokenChooser(
        Sampler(Sampling(temperature=1.0), seed, drawn=len(tokens) - 2),
        Shaping(grammar=schema),
        prompt=2,
    )
    grammar = Grammar(b"c", schema, VOCABULARY, answers)
    logits = random.normal(size=(200, VOCABULARY)).astype(np.float32)
    grammar.begin(tokens, 2)
    while not grammar.complete and len(tokens) < 150:
        tokens.append(chooser.next(logits[len(tokens)], tokens, grammar.allowed()).token)
        grammar.advance()
        grammar.look(0, ())
    grammar.end()
    return tokens[2:]


def test_whatever_is_drawn_follows_the_schema(tokenizer: Tokenizer, schema: str) -> None:
    answers = Answers(tokenizer)
    written = [write(answers, schema, seed) for seed in range(6)]
    for tokens in written:
        value = json.loads(tokenizer.decoder.decode(tokens))
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "y")
    assert len({tuple(tokens) for tokens in written}) > 1
    assert not len(answers.grammars)  # each was dropped at its end


def test_what_takes_long_behind_guesses_is_left_out(
    tokenizer: Tokenizer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask itself is there: an answer never ends by what was only guessed."""
    found = []
    for seconds in (1e9, -1.0):
        monkeypatch.setattr("pipeline.text.grammar.AHEAD_SECONDS", seconds)
        found.append(Grammars(tokenizer).compile(Follow(0, VOCABULARY, (), schema, ahead=4)))
    whole, cut = found
    assert tokenizer.decoder.decode(whole.guesses[:1]) == "{"
    assert (cut.guesses, len(cut.masks), cut.error) == ((), 0, "")
    assert (cut.mask == whole.mask).all()


@pytest.mark.parametrize("place", [0, 1, 4])
def test_the_answer_is_the_same_behind_a_part_of_it(tokenizer: Tokenizer, schema: str, place: int) -> None:
    """Another client's request resumed here, or another process in the midst of it."""
    whole = write(Answers(tokenizer), schema, 3)
    assert write(Answers(tokenizer), schema, 3, whole[:place]) == whole
    restarted = Answers(tokenizer, restart=place)
    assert write(restarted, schema, 3) == whole
    assert restarted.asked > place


def test_a_grammar_without_its_mask_is_not_ready(tokenizer: Tokenizer, schema: str) -> None:
    asked: list[MaskRequest | MaskDropped] = []
    grammar = Grammar(b"c", schema, VOCABULARY, asked.append)
    assert not grammar.ready
    tokens = [9]
    grammar.begin(tokens, 1)
    assert not grammar.ready
    assert not grammar.complete
    (wanted,) = asked
    Answers(tokenizer)(wanted)
    assert grammar.ready
    assert {tokenizer.decoder.decode([token])[0] for token in np.flatnonzero(grammar.allowed())} == {"{"}
    tokens.append(5)
    grammar.advance()
    grammar.look(0, ())
    assert not grammar.ready
    grammar.begin(tokens, 1)  # admitted again: a late answer to the last request is none to this one
    second, dropped, third = asked[1:]
    assert isinstance(second, MaskRequest)
    assert isinstance(third, MaskRequest)
    assert dropped == MaskDropped(wanted.answer)
    second.allowed = wanted.allowed
    assert not grammar.ready
    assert third.answer != second.answer


@pytest.mark.parametrize("tokens", [(5, 5), (VOCABULARY + 7,)])
def test_a_grammar_that_nothing_can_follow_ends_with_a_line(
    tokenizer: Tokenizer, schema: str, tokens: tuple[int, ...]
) -> None:
    answers = Answers(tokenizer)
    grammar = Grammar(b"c", schema, VOCABULARY, answers)
    grammar.begin(tokens, 0)  # no beginning of an object
    assert grammar.ready
    assert not grammar.complete
    with pytest.raises(PipelineError, match=r"^the grammar cannot be followed further: .+"):
        grammar.allowed()
    unknown = answers.grammars.follow(Follow(99, VOCABULARY))
    assert unknown.error.startswith("the grammar cannot be followed further")


DIGITS = "\n".join(f"r{n}: /[a-{chr(98 + n % 20)}]+{n}/" for n in range(1900))
TOO_MANY = "start: " + " | ".join(f"r{n}" for n in range(1900)) + "\n" + DIGITS


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('{"grammars": 1}', "invalid type: integer `1`, expected a sequence at line 1 column 14"),
        ("start: nowhere", 'at 1(8): unknown name: "nowhere"'),
        ('start: "a', "1(10): lexer error"),
        ("start: " + '"x" ' * 5000 + "/(/", 'at 1(8): invalid regex "(" (in regex): regex parse error: ( ^'),
        (TOO_MANY, "lexer error: too many expressions constructed"),
    ],
)
def test_what_is_no_grammar_is_refused_by_one_short_line(
    tokenizer: Tokenizer, grammar: str, reason: str
) -> None:
    """Without what the library shows of itself, or of the grammar."""
    try:
        check_grammar(grammar)
        line = Grammars(tokenizer).compile(Follow(0, VOCABULARY, (), grammar)).error
    except RequestError as e:
        line = str(e)
    assert re.match(r"the grammar (or schema cannot be used|cannot be followed further): ", line)
    assert line.partition("further: ")[2].startswith(reason) or line.partition("used: ")[2].startswith(reason)
    assert "<state>" not in line
    assert "|" not in line
    assert len(line) <= 140
    assert "\n" not in line


def test_the_client_with_most_loses_its_largest_grammar(tokenizer: Tokenizer, schema: str) -> None:
    """Not the one with the largest; and a grammar whose answer has ended is not kept."""
    grammars = Grammars(tokenizer)
    sizes = [(b"a", 300), (b"b", 600), (b"a", 400), (b"c", 0)]
    for answer, (client, more) in enumerate(sizes):
        grammar = schema + " " * more
        assert not grammars.compile(Follow(answer, VOCABULARY, (), grammar, client)).error
    grammars.drop_largest()
    errors = [grammars.follow(Follow(answer, VOCABULARY)).error for answer in range(4)]
    assert [bool(error) for error in errors] == [False, False, True, False]
    assert errors[2].startswith("the grammar cannot be followed further: all grammars take more than 2 GB")
    grammars.drop_largest()
    assert [bool(grammars.follow(Follow(answer, VOCABULARY)).error) for answer in (0, 1)] == [False, True]
    for ended in (4, 1):  # before the compilation of the first has ended
        grammars.drop(ended)
    grammars.compile(Follow(4, VOCABULARY, (), schema))
    assert len(grammars) == 2
