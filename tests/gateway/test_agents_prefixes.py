"""Whole conversations of agents over HTTP: what stands in an earlier request of theirs is not computed again,
and answers are those of requests that are computed alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agent_requests
import codex_turns
import numpy as np
import pytest
from gateway_engine import Served, serve

from pipeline.assets import model_dir
from pipeline.gateway.bodies import MessagesBody, fitting
from pipeline.gateway.messages import messages_request
from pipeline.gateway.response_request import ResponsesBody, response_request
from pipeline.scheduling.prefix_tree import common_prefix
from pipeline.text.chat_format import TemplateKind
from protocol.client import Client

CONTEXT = 8192
TOKENS = 5  # of each answer
BOUND = 1e-4  # as launch/equality.py has for float32
KIND = TemplateKind.of_text((model_dir() / "chat_template.jinja").read_text())
Body = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("models") / "agents"
    shutil.copytree(model_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    exact = ("--format", "f32", "--backbone-dtype", "f32")
    with serve("--model", str(folder), "--context", str(CONTEXT), *exact) as running:
        yield running


def claude(served: Served, body: Body) -> tuple[str, int, int]:
    """The text of an answer, the tokens of its prompt, and how many of them were found."""
    with served.http() as http:
        answer = http.post("/v1/messages", json=body).json()
    usage, found = answer["usage"], answer["usage"]["cache_read_input_tokens"]
    text = "".join(block["text"] for block in answer["content"])
    return text, usage["input_tokens"] + found, found


def codex(served: Served, body: Body) -> tuple[str, int, int]:
    with served.http() as http:
        answer = http.post("/v1/responses", json=body).json()
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    usage = answer["usage"]
    return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def batches(agent: str) -> list[list[Body]]:
    """Requests in order; those of one list are sent at once."""
    if agent == "claude":
        return [
            [body | {"max_tokens": TOKENS, "temperature": 0} for body in bodies]
            for bodies in agent_requests.conversation()
        ]
    more = {"max_output_tokens": TOKENS, "temperature": 0, "stream": False}
    return [[body | more] for body in codex_turns.requests()]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["claude", "codex"])
async def test_what_stands_in_an_earlier_request_is_found(served: Served, agent: str) -> None:
    ask, earlier = (claude if agent == "claude" else codex), list[np.ndarray]()
    known = found = 0
    async with Client.connect(served.endpoint) as own:
        for bodies in batches(agent):
            answers = await asyncio.gather(*(asyncio.to_thread(ask, served, body) for body in bodies))
            for body, (text, prompt, reused) in zip(bodies, answers, strict=True):
                if agent == "claude":
                    asked = messages_request(fitting(body, MessagesBody, ""), own.welcome, KIND)
                else:
                    asked = response_request(fitting(body, ResponsesBody, ""), own.welcome, KIND)
                what: Body = {"messages": asked.messages, "template": asked.template}
                ids = (await own.tokenize(**what)).ids.astype(np.int32)
                assert len(ids) == prompt
                known += max((common_prefix(ids[:-1], other) for other in earlier), default=0)
                found += reused
                earlier.append(ids)
                if len(earlier) % 8 == 2:  # the first ones, a later and a long one
                    await check(own, what | asked.settings.of_choice(0) | {"max_tokens": TOKENS}, text)
    assert len(earlier) >= 20
    assert known > 10_000
    assert found >= 0.95 * known


async def check(own: Client, what: Body, text: str) -> None:
    """That the answer is the one of a request that is computed alone, or differs where two tokens are as
    likely."""
    answer = own.generate(**what, reuse=False)
    tokens = [token async for token in answer]
    alone = "".join(token.text for token in tokens) + answer.done.text
    assert answer.done.stats["kv_reused_tokens"] == 0
    assert text == alone or min(token.margin for token in tokens) < BOUND
