"""Chat completions over HTTP, as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx2 as httpx
import pytest
from gateway_engine import Served
from waiting import until

from protocol.client import Client
from protocol.messages import ChatMessage

QUESTION = [{"role": "user", "content": "What is a list?"}]
WRONG_SCHEMA = {"type": "json_schema", "schema": {"type": "x"}}
OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
CALLED = "messages[0].tool_calls[0].function"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def engine_answer(served: Served, **arguments: Any) -> tuple[str, str]:
    """Returns text and reason of the engine's answer to QUESTION, whose prompt is in the prefix cache then:
    sums are rounded in an order that depends on how much of a prompt is computed together."""

    async def ask() -> tuple[str, str]:
        async with Client.connect(served.endpoint) as own:
            asked = [ChatMessage("user", "What is a list?")]
            for _ in range(2):
                made = own.generate(messages=asked, sampling=own.welcome.sampling, **arguments)
                answer = await made.result()
            return answer.text, answer.done.reason

    return asyncio.run(ask())


def engine_stats(served: Served) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with Client.connect(served.endpoint) as own:
            return await own.stats()

    return asyncio.run(ask())


def test_an_answer_is_the_engines(served: Served, client: Any) -> None:
    text, reason = engine_answer(served, max_tokens=24)
    found = client.chat.completions.create(model="tandem-embedded", messages=QUESTION, max_tokens=24)
    assert found.choices[0].message.content == text
    assert found.choices[0].finish_reason == reason
    assert found.usage.completion_tokens <= 24
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(served: Served, client: Any) -> None:
    text, reason = engine_answer(served, max_tokens=24)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tandem-embedded", messages=QUESTION, max_tokens=24, stream=True, stream_options=options
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 24


def test_choices_have_places_and_seeds_of_their_own(client: Any) -> None:
    def ask() -> list[tuple[int, str]]:
        found = client.chat.completions.create(
            model="tandem-embedded", messages=QUESTION, max_tokens=12, n=3, temperature=1.5, seed=7
        )
        return [(choice.index, choice.message.content) for choice in found.choices]

    first = ask()
    assert [index for index, _ in first] == [0, 1, 2]
    assert len({text for _, text in first}) > 1
    assert ask() == first


def test_the_next_turn_reuses_what_was_computed(client: Any) -> None:
    question = [{"role": "user", "content": "What is a generator, and why would one use it?"}]
    first = client.chat.completions.create(model="tandem-embedded", messages=question, max_tokens=8)
    turns = [
        *question,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And a list?"},
    ]
    second = client.chat.completions.create(model="tandem-embedded", messages=turns, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(
        model="tandem-embedded", messages=turns, max_tokens=1, **options
    )
    assert last.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_a_client_that_disconnects_cancels_its_answer(served: Served) -> None:
    before = engine_stats(served)["scheduler"]["ended"]
    body = {"messages": QUESTION, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with served.http() as http:
        for stream in (True, False):
            try:
                with http.stream(
                    "POST", "/v1/chat/completions", json=body | {"stream": stream}, timeout=0.5
                ) as answer:
                    next(answer.iter_lines())
            except httpx.TimeoutException:
                assert not stream
    until = time.monotonic() + 20
    while (stats := engine_stats(served)["scheduler"])["ended"] < before + 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert stats["ended"] == before + 2
    assert stats["running"] == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1e400}, None),  # which is no JSON
        ({"n": 99}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["x" * 600]}, "stop"),
        ({"tool_choice": {"type": "function", "function": {"name": ["f"]}}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, CALLED),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        # By the engine: where the texts are read
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": WRONG_SCHEMA}, "response_format"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(
    served: Served, change: dict[str, Any], param: str | None
) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 4} | change)
    with served.http() as http:
        found = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    assert found.json()["error"]["type"] == "invalid_request_error"


async def test_the_engine_is_described_as_programs_for_llama_server_read_it(served: Served) -> None:
    async with Client.connect(served.endpoint) as own, httpx.AsyncClient(base_url=served.url) as http:
        assert (await http.get("/version")).json().keys() == {"version"}
        props = (await http.get("/props?model=any")).json()
        assert props["default_generation_settings"]["n_ctx"] == own.welcome.context
        sampling = props["default_generation_settings"]["params"]
        assert sampling["temperature"] == own.welcome.sampling.temperature
        assert "messages" in props["chat_template"]
        slots = (await http.get("/slots")).json()
        assert len(slots) == props["total_slots"] == 16
        assert slots[0] == {
            "id": 0,
            "n_ctx": own.welcome.context,
            "speculative": False,
            "is_processing": False,
        }
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 200
        answers = [own.generate(token_ids=(5,), max_tokens=400, ignore_eos=True) for _ in slots]
        await until(lambda: all(answer.token_ids for answer in answers), 30)
        busy, full = await http.get("/slots"), await http.get("/slots?fail_on_no_slot=1")
        assert all(slot["is_processing"] for slot in busy.json())
        assert full.status_code == 503
        for answer in answers:
            await answer.cancel()


def test_refusals_have_the_status_that_fits(served: Served) -> None:
    kind = {"content-type": "application/json"}
    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/nowhere").status_code == 404
        assert http.delete("/v1/models").status_code == 405
        assert http.post("/v1/chat/completions", content=b"{}").status_code == 415
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/health", headers={"origin": "http://evil.example"}).status_code == 403
        for wrong in (b"{", b"[]", b'{"a":NaN}', b"[" * 50000, b"\xff"):
            assert http.post("/v1/chat/completions", content=wrong, headers=kind).status_code == 400
        for large in (b'{"a":"' + b"x" * (33 << 20) + b'"}', b'{"a":[' + b"1," * (1 << 20) + b"1,1]}"):
            assert http.post("/v1/chat/completions", content=large, headers=kind).status_code == 413
        long = [{"role": "user", "content": "word " * 5000}]
        for stream in (False, True):
            refused = http.post("/v1/chat/completions", json={"messages": long, "stream": stream})
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": [[5] * 5000] * 2, "echo": True, "logprobs": 1}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 64, "n": 16}, "n"),
        ("/v1/completions", {"prompt": "a", "guided_grammar": "start: ("}, "guided_grammar"),
        ("/v1/completions", {"prompt": "a", "echo": True, "n": 2}, "echo"),
        ("/v1/responses", {"input": "word " * 5000}, "input"),
        ("/v1/responses", {"input": "a", "n": 2}, "n"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "truncation": "auto"}, "truncation"),
        ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"input": "a", "text": {"format": WRONG_SCHEMA}}, "text.format"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
        ("/v1/messages", {"output_format": WRONG_SCHEMA}, "output_format"),
        ("/v1/messages", {"output_format": OBJECT, "output_config": {"format": OBJECT}}, "output_format"),
    ],
)
def test_other_endpoints_name_the_field_too(
    served: Served, path: str, change: dict[str, Any], param: str
) -> None:
    with served.http() as http:
        found = http.post(path, json={"messages": QUESTION, "max_tokens": 4} | change)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["message"].startswith(f"{param}: ")
    assert error.get("param", param) == param


HARMLESS = {
    **{"model": "gpt-9", "service_tier": "auto", "min_tokens": 0, "x": [1], "user": "u", "store": True},
    **{"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low"},
    **{"web_search_options": {}, "reasoning_effort": "high", "mcp_servers": [{"name": "x"}]},
    **{"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "max"}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    **{"cache_control": {"type": "ephemeral"}, "speed": "fast", "betas": ["x"], "container": None},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_fields_of_other_servers_and_models_are_accepted(served: Served, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    asked |= {"messages": QUESTION} if path != "/v1/completions" else {"prompt": "What is a list?"}
    with served.http() as http:
        plain, harmless = (http.post(path, json=asked | f) for f in ({}, HARMLESS))
    assert harmless.status_code == 200, harmless.text
    assert harmless.json()["model"] == plain.json()["model"] == "tandem-embedded"
    for name in ("choices", "content"):
        assert harmless.json().get(name) == plain.json().get(name)


def test_the_embedded_model_calls_tools_that_are_demanded(client: Any) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": city}}
    asked = {"model": "any", "tools": [tool], "max_tokens": 64}
    found = client.chat.completions.create(**asked, messages=QUESTION, tool_choice="required").choices[0]
    (call,) = found.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    turns = [*QUESTION, found.message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    again = client.chat.completions.create(**asked, messages=turns, tool_choice="none").choices[0]
    assert again.message.tool_calls is None
    cut = client.chat.completions.create(
        **asked | {"max_tokens": 2}, messages=QUESTION, tool_choice="required"
    ).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", "", None)
    assert client.models.retrieve("any").id == "tandem-embedded"


def test_no_probability_left_is_the_most_probable_token(served: Served) -> None:
    with served.http() as http:
        texts = [
            http.post("/v1/completions", json={"prompt": "What is", "max_tokens": 8} | how).json()["choices"]
            for how in ({"temperature": 0}, {"temperature": 2, "top_p": 0})
        ]
    assert texts[0] == texts[1]


def test_an_answer_without_a_limit_gets_a_quarter_of_the_context(client: Any) -> None:
    asked = {"model": "tandem-embedded", "messages": QUESTION, "extra_body": {"ignore_eos": True}}
    found = client.chat.completions.create(**asked)
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 256)


def test_a_schema_for_messages_is_followed(served: Served) -> None:
    schema = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    for form in ({"output_format": schema}, {"output_config": {"format": schema}}):
        with served.http() as http:
            found = http.post("/v1/messages", json={"messages": QUESTION, "max_tokens": 20} | form)
        assert json.loads(found.json()["content"][0]["text"]) in ("yes", "no")


def test_a_body_that_is_too_large_is_answered_after_it(served: Served) -> None:
    """As most clients do, which read no answer before they have sent all; their connection lives on."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=20)
    with closing(connection):
        for body, status in ((b" " * (33 << 20), 413), (json.dumps({"messages": QUESTION}).encode(), 200)):
            connection.request(
                "POST", "/v1/messages/count_tokens", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert (answer.status, "error" in json.loads(answer.read())) == (status, status != 200)
