"""A model whose chat template and tokenizer do not end, fail or fill the memory for some texts: in a process
of its own they hold up no other client, and each such text ends with one line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_engines import State, config

from pipeline.assets import model_dir
from pipeline.text.encoder_process import NICENESS
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import ChatMessage
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
    async with start_engine(config(folder)) as (supervisor, client):
        yield State(supervisor, client)


async def refusal(client: Client, content: str) -> str:
    with pytest.raises(RequestFailed) as failed:
        await client.generate(messages=[ChatMessage("user", content)]).result()
    return str(failed.value)


def tokenizer(state: State) -> Identity:
    (found,) = [who for who in state.supervisor.pids if who.role == "tokenizer"]
    return found


async def test_template_that_does_not_end_is_given_up_while_other_answers_go_on(state: State) -> None:
    await state.client.generate(prompt="It is up.", max_tokens=1).result()
    before = tokenizer(state)
    endpoint = state.supervisor.endpoint
    async with Client.connect(endpoint) as other, Client.connect(endpoint) as third:
        began = time.monotonic()
        looping = asyncio.create_task(refusal(state.client, "loop"))
        await asyncio.sleep(0.2)
        behind = asyncio.create_task(third.generate(prompt="Hello", max_tokens=1).result())
        longest, answers = 0.0, 0
        while not looping.done():
            asked = time.monotonic()
            await other.generate(token_ids=IDS, max_tokens=4, ignore_eos=True).result()
            longest, answers = max(longest, time.monotonic() - asked), answers + 1
        assert await looping == "encoding this text took longer than 5 s, and it was given up"
        assert time.monotonic() - began < 15
        assert longest < 3
        assert answers > 5
        assert len((await behind).tokens) == 1  # it was encoded by the next process
    assert tokenizer(state).incarnation == before.incarnation + 1


async def test_failing_tokenizer_and_full_memory_are_one_line_each(state: State, capfd) -> None:
    before = tokenizer(state)
    assert await refusal(state.client, "fill") == "the model's chat template refuses this: MemoryError"
    reason = await refusal(state.client, "x" * 100)
    assert reason.startswith("the model's tokenizer failed: ")
    assert "retry-limit" in reason
    assert len((await state.client.generate(prompt="Hello", max_tokens=1).result()).tokens) == 1
    assert tokenizer(state) == before
    assert "panicked" not in capfd.readouterr().err


async def test_killed_tokenizer_is_restarted_and_texts_are_sent_again(state: State) -> None:
    before = tokenizer(state).incarnation
    nice = [os.getpriority(os.PRIO_PROCESS, state.pid(role)) for role in ("tokenizer", "coordinator")]
    assert nice[0] == nice[1] + NICENESS
    state.send(signal.SIGKILL, "tokenizer")
    answers = [state.client.generate(prompt="Hello", max_tokens=2).result() for _ in range(3)]
    assert [len(answer.tokens) for answer in await asyncio.gather(*answers)] == [2] * 3
    assert tokenizer(state).incarnation == before + 1
