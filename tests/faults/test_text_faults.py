"""A model whose chat template and tokenizer do not end, fail or fill the memory for some texts, grammars that
crash their library, and a text process that is killed: only the request that was being computed ends, with
one line; other answers go on, with the same tokens."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from fault_engines import LIMIT, State, config, same
from waiting import until

from launch.processes.monitor import Limits
from pipeline.assets import model_dir
from pipeline.text.process import NICENESS
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import ChatMessage, Shaping, Token
from protocol.sockets import Identity

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

LOOPS = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}"
    "{% if messages[0].content == 'fill' %}{{ ('x' * 9000000000) | length }}{% endif %}"
    "{{ messages[0].content }}"
)
IDS = (5, 6, 7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tmp_path_factory) -> AsyncIterator[State]:
    """Of the embedded model, with this template, and an expression that searches for ever behind an x."""
    folder: Path = tmp_path_factory.mktemp("hostile")
    shutil.copytree(model_dir(), folder, dirs_exist_ok=True)
    changed = json.loads((folder / "tokenizer.json").read_text())
    regex = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    parts = [regex, changed["pre_tokenizer"]]
    changed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    for name, content in (("tokenizer.json", json.dumps(changed)), ("chat_template.jinja", TEMPLATE)):
        (folder / name).unlink()
        (folder / name).write_text(content)
    async with start_engine(config(folder), Limits(stopped_checks=1000)) as (supervisor, client):
        yield State(supervisor, client)


async def refusal(client: Client, content: str) -> str:
    with pytest.raises(RequestFailed) as failed:
        await client.generate(messages=[ChatMessage("user", content)]).result()
    return str(failed.value)


def process(state: State, role: str = "text") -> Identity:
    (running,) = [who for who in state.supervisor.pids if who.role == role]
    return running


async def restarted(state: State, before: Identity) -> None:
    """Wait until the text process is the one after `before`."""
    await until(lambda: state.generation("text") == before.generation + 1, LIMIT)


@pytest.fixture(scope="module")
def grammar() -> str:
    """Of a list of words, long enough for any fault to happen within."""
    llguidance = pytest.importorskip("llguidance", reason="of the extra `serve`")
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 200}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))


async def answer(client: Client, grammar: str = "", fault: Callable[[], None] | None = None) -> list[Token]:
    """Sixty tokens; `fault` happens after the eighth."""
    tokens = []
    async for token in client.generate(
        token_ids=IDS, max_tokens=60, ignore_eos=not grammar, shaping=Shaping(grammar=grammar)
    ):
        tokens.append(token)
        if fault is not None and len(tokens) == 8:
            fault()
    return tokens


async def test_template_that_does_not_end_is_given_up_while_other_answers_go_on(state: State) -> None:
    before = process(state)
    endpoint = state.supervisor.endpoint
    async with Client.connect(endpoint) as other, Client.connect(endpoint) as third:
        looping = asyncio.create_task(refusal(state.client, "loop"))
        await asyncio.sleep(0)
        await state.client.stats()  # its message has arrived
        behind = asyncio.create_task(third.generate(prompt="Hello", max_tokens=1).result())
        answers = 0
        while not looping.done():
            await other.generate(token_ids=IDS, max_tokens=4, ignore_eos=True).result()
            answers += 1
        assert await looping == "encoding this text took longer than 5 s, and it was given up"
        assert answers > 1
        assert len((await behind).tokens) == 1  # it was encoded by the next process
    await restarted(state, before)


async def test_failing_tokenizer_and_full_memory_are_one_line_each(state: State, capfd) -> None:
    before = process(state)
    assert await refusal(state.client, "fill") == "the model's chat template refuses this: MemoryError"
    reason = await refusal(state.client, "x" * 100)
    assert reason.startswith("the model's tokenizer failed: ")
    assert "retry-limit" in reason
    assert len((await state.client.generate(prompt="Hello", max_tokens=1).result()).tokens) == 1
    assert process(state) == before
    assert "panicked" not in capfd.readouterr().err


async def test_killed_process_is_restarted_and_texts_are_sent_again(state: State) -> None:
    before = process(state)
    nice = [os.getpriority(os.PRIO_PROCESS, state.pid(role)) for role in ("text", "coordinator")]
    assert nice[0] == min(nice[1] + NICENESS, 19)  # the largest that there is
    state.send(signal.SIGKILL, "text")
    answers = [state.client.generate(prompt="Hello", max_tokens=2).result() for _ in range(3)]
    assert [len(answer.tokens) for answer in await asyncio.gather(*answers)] == [2] * 3
    await restarted(state, before)


async def test_answers_with_a_grammar_survive_a_kill_with_the_same_tokens(state: State, grammar: str) -> None:
    reference, plain = await answer(state.client, grammar), await answer(state.client)
    before = process(state)
    kill = lambda: state.send(signal.SIGKILL, "text")  # noqa: E731
    async with Client.connect(state.supervisor.endpoint) as other:
        answers = await asyncio.gather(
            answer(state.client, grammar, kill), answer(other, grammar), answer(other)
        )
    for tokens, alone in zip(answers, (reference, reference, plain), strict=True):
        assert same(tokens, alone)
    await restarted(state, before)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
async def test_death_during_a_mask_costs_its_answer_if_it_was_a_crash(
    state: State, grammar: str, number: signal.Signals
) -> None:
    """The process is stopped while it has a mask to make, and dies when it would go on. After a kill from
    outside the mask is made again."""
    reference = await answer(state.client, grammar)
    before = process(state)
    async with Client.connect(state.supervisor.endpoint) as other:
        while True:
            stopped = asyncio.Event()

            def stop(stopped: asyncio.Event = stopped) -> None:
                state.send(signal.SIGSTOP, "text")
                stopped.set()

            dying = asyncio.create_task(answer(state.client, grammar, stop))
            await stopped.wait()
            await other.generate(token_ids=IDS, max_tokens=3).result()  # others go on: it waits for its mask
            await state.client.stats()
            if not dying.done():
                break
            state.send(signal.SIGCONT, "text")  # all masks had been made before: again
        for sent in (number, signal.SIGCONT):
            state.send(sent, "text")
        if number == signal.SIGKILL:
            assert same(await dying, reference)
        else:
            reason = "^the grammar cannot be followed further: it ended the text process$"
            with pytest.raises(RequestFailed, match=reason):
                await dying
        assert same(await answer(other, grammar), reference)
    await restarted(state, before)


async def test_chains_of_rules_do_not_overflow_the_librarys_stack(state: State) -> None:
    """Each rule is the next one. What is too large is refused before the library sees it; in a form in which
    that is not seen, the library's stack is large enough."""
    before = process(state)
    rules = [f"r{number}: r{number + 1}" for number in range(8000)]
    for grammar in (
        "\n".join(["start: r0", *rules, 'r8000: "a"']),
        json.dumps({"grammars": [{"lark_grammar": "\n".join(["start: r0", *rules, 'r8000: "a"'])}]}),
        json.dumps({"grammars": [{"json_schema": {"$ref": "#/$defs/0", "$defs": {}, "x": ["$ref"] * 2000}}]}),
    ):
        with pytest.raises(RequestFailed, match=r"^a grammar has 2000 rules or references at most$"):
            await state.client.generate(token_ids=IDS, shaping=Shaping(grammar=grammar)).result()
    lark = json.dumps({"grammars": [{"lark_grammar": "\n".join(["start: r0", *rules, 'r8000: "a"'])}]})
    hidden = Shaping(grammar=lark.replace("\\n", "\\u000a"))
    assert (await state.client.generate(token_ids=IDS, shaping=hidden).result()).text == "a"
    assert process(state) == before
