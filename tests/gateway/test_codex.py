"""Codex against a gateway: what it sends, and what it reads of the answers. The model's chat template has no
place for tools."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import shutil
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise, takewhile
from operator import eq
from types import SimpleNamespace
from typing import Any

import pytest
from chat_styles import STYLES, Style
from codex_turns import (
    ADDED,
    IMAGE,
    MODEL,
    NOTE_TEXT,
    PATCH,
    TOOLS,
    call,
    function,
    message,
    output,
    requests,
)
from gateway_engine import Served, serve
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.assets import model_dir
from pipeline.fairness import RateLimiter
from pipeline.gateway import bodies, responses
from pipeline.gateway.answers import ChatEvent, Whole
from pipeline.gateway.bodies import MOST_MEMBERS, ChatBody, fitting, inflated
from pipeline.gateway.call import MOST_BYTES
from pipeline.gateway.chat import Chat, chat_request
from pipeline.gateway.errors import ApiError
from pipeline.gateway.metrics import Meter
from pipeline.gateway.response_items import SUMMARY, sealed, unsealed
from pipeline.gateway.response_request import SUMMARIZE, ResponseRequest, ResponsesBody, response_request
from pipeline.gateway.responses import Response
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_history import as_template_reads
from pipeline.text.chat_output import Part, ToolCall
from protocol.messages import VERSION, Welcome

if find_spec("openai") is None:  # to import it takes a while, in each of several processes
    pytest.skip("of the extra `dev`", allow_module_level=True)
pydantic = pytest.importorskip("pydantic")
zstandard = pytest.importorskip("zstandard")
CONTEXT = 8192
PLAIN = """\
{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}\
{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PLAIN_KIND = TemplateKind.of_text(PLAIN)
CODINGS = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}
WELCOME = Welcome(VERSION, "e", MODEL, "f", "cpu", "all-host", True, 9, CONTEXT, True, True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(model_dir(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in model_dir().glob("*.safetensors"):
        (folder / weights.name).symlink_to(weights)
    (folder / "chat_template.jinja").write_text(PLAIN)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    with serve("--model", str(folder)) as running:
        yield running


def post(served: Served, body: dict[str, Any], path: str = "", coding: str = "identity") -> Any:
    headers = {"content-type": "application/json", "content-encoding": coding}
    content = CODINGS[coding](json.dumps(body).encode())
    with served.http() as http:
        return http.post(f"/v1/responses{path}", content=content, headers=headers)


@cache
def event_type() -> Any:
    """Reads JSON as strictly as the package's types have an event of a stream."""
    from openai.types.responses import ResponseStreamEvent

    return pydantic.TypeAdapter(ResponseStreamEvent)


def streamed(answer: Any) -> list[Any]:
    """The events of an answer but later signs of life, each as strictly as the package's types have it."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [event_type().validate_json(line) for line in lines]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [event for event in events if event.type != "response.in_progress" or event.sequence_number == 1]


def whole(answer: Any) -> Any:
    from openai.types.responses import Response

    assert answer.status_code == 200, answer.text
    return Response.model_validate_json(answer.text)


def read(body: dict[str, Any], kind: TemplateKind = PLAIN_KIND) -> ResponseRequest:
    return response_request(fitting(body, ResponsesBody, ""), WELCOME, kind)


def test_every_turn_is_answered_streamed_and_whole(served: Served) -> None:
    codings, before, known, cached = list(CODINGS), 0, 0, 0
    for turn, body in enumerate(requests()):
        body["max_output_tokens"] = 3
        coding = codings[turn % len(codings)]
        events = streamed(post(served, body, coding=coding))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output == done
        usage = last.response.usage
        assert usage.input_tokens >= before  # some items are left out
        known += before
        cached += usage.input_tokens_details.cached_tokens
        before = usage.input_tokens
        if turn % 3 == 1:  # by each coding in turn
            again = whole(post(served, body | {"stream": False}, coding=coding))
            assert again.usage.input_tokens == before
            assert again.usage.input_tokens_details.cached_tokens >= before - 1
    assert turn == 19
    assert cached >= 0.95 * known


@pytest.mark.parametrize(
    ("choice", "item", "field"),
    [
        ({"type": "function", "name": "shell_command"}, "function_call", "arguments"),
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", "input"),
        ({"type": "function", "name": "mcp__notes__write"}, "custom_tool_call", "input"),
    ],
)
def test_calls_come_back_as_the_client_knows_its_tools(
    served: Served, choice: dict[str, Any], item: str, field: str
) -> None:
    body = next(iter(requests())) | {"tool_choice": choice, "max_output_tokens": 400, "temperature": 0.0}
    events = streamed(post(served, body))
    added, *deltas, done, ended, last = events[2:]
    kind = {"arguments": "response.function_call_arguments", "input": "response.custom_tool_call_input"}[
        field
    ]
    assert (added.type, added.item.type) == ("response.output_item.added", item)
    assert {delta.type for delta in deltas} == {f"{kind}.delta"}
    text = "".join(delta.delta for delta in deltas)
    assert done.type == f"{kind}.done"
    assert getattr(done, field) == getattr(ended.item, field) == text
    assert (ended.type, last.type) == ("response.output_item.done", "response.completed")
    assert {event.item_id for event in (*deltas, done)} == {added.item.id} == {ended.item.id}
    assert ended.item.name == choice["name"].removeprefix("mcp__notes__")
    assert ended.item.namespace == ("mcp__notes" if ended.item.name == "write" else None)
    called = ended.item.model_dump(exclude_none=True)
    result = {"type": f"{item}_output", "call_id": called["call_id"], "output": "yes"}
    again = body | {"input": [*body["input"], called, result], "tool_choice": "auto", "max_output_tokens": 2}
    assert (
        whole(post(served, again | {"stream": False})).usage.input_tokens > last.response.usage.input_tokens
    )


def test_chats_have_tools_without_a_place_for_them(served: Served) -> None:
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{"a": 1}]}}}
        picture = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}
        asked: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Call f."}, picture]}]
        found = client.chat.completions.create(
            model=MODEL, messages=asked, tools=[tool], tool_choice="required", max_tokens=100
        )
        (call,) = found.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
        told = [*asked, found.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
        again = client.chat.completions.create(model=MODEL, messages=told, tools=[tool], max_tokens=2)
        assert again.usage.prompt_tokens_details.cached_tokens >= found.usage.prompt_tokens - 1


def test_a_conversation_is_shortened_by_the_model(served: Served) -> None:
    from openai.types.responses import CompactedResponse

    *_, body = requests()
    body["max_output_tokens"] = 24
    names = ("model", "instructions", "input", "tools", "parallel_tool_calls", "max_output_tokens")
    compact = {name: body[name] for name in names}
    answer = post(served, compact, "/compact", "zstd")
    found = CompactedResponse.construct(**answer.json())
    *questions, summary = answer.json()["output"]
    assert questions == [item for item in body["input"] if item.get("role") == "user"]
    assert summary["type"] == "compaction"
    assert unsealed(summary["encrypted_content"])
    assert 0 < found.usage.output_tokens <= 24

    asked = body | {"input": [*body["input"], {"type": "compaction_trigger"}]}
    events = streamed(post(served, asked))
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == ["compaction"]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output == items
    assert events[-1].response.usage.input_tokens_details.cached_tokens > found.usage.input_tokens - 100
    left = body | {"input": [message("user", "Hello."), items[0].model_dump(exclude_none=True)]}
    assert SUMMARY + unsealed(items[0].encrypted_content) in read(left).messages[-1].content
    assert whole(post(served, left | {"stream": False, "max_output_tokens": 2})).usage.output_tokens


def test_probes_and_what_is_refused(served: Served) -> None:
    body = next(iter(requests()))
    probed = streamed(post(served, body | {"input": []}))
    assert [event.type.rpartition(".")[2] for event in probed] == ["created", "in_progress", "completed"]
    assert whole(post(served, {"input": [], "stream": False})).output == []
    refused = post(served, body | {"previous_response_id": "resp_1"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    for items, param in (
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([{"type": 5}], "input[0].type"),
        ([{"role": "king"}], "input[0].role"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "f"}], "input[0].input"),
    ):
        assert post(served, body | {"input": items}).json()["error"]["param"] == param
    for tools, param in (([{"name": "f"}], "tools[0].type"), ([{"type": "custom"}], "tools[0].name")):
        assert post(served, body | {"tools": tools}).json()["error"]["param"] == param
    failed = post(served, body | {"input": "word " * 3 * CONTEXT})
    assert failed.status_code == 200
    kinds = [line.removeprefix("event: response.") for line in failed.text.splitlines() if "event: " in line]
    assert kinds == ["created", "failed"]
    error = json.loads(failed.text.rpartition("data: ")[2])["response"]["error"]
    assert error["code"] == "context_length_exceeded"  # of which the package's types know nothing
    with served.http() as http:
        known = http.get("/v1/models").json()
        assert http.get("/v1/responses").status_code == 405
    assert known["models"][0]["slug"] == known["data"][0]["id"]
    assert known["models"][0]["context_window"] == CONTEXT


def test_coded_bodies_that_are_refused(served: Served) -> None:
    bombs = {coding: CODINGS[coding](bytes(MOST_BYTES + 1)) for coding in ("zstd", "gzip", "deflate")}
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    writer = zstandard.ZstdCompressor(compression_params=window).compressobj()
    wrong = [*((coding, bomb, 413) for coding, bomb in bombs.items()), ("br", b"{}", 415)]
    wrong += [(coding, CODINGS[coding](b"{}" * 99)[:-5], 400) for coding in ("gzip", "deflate")]
    wrong += [(coding, b"{}", 400) for coding in bombs]
    wrong += [("zstd", writer.compress(b"{}") + writer.flush(), 400), ("gzip", gzip.compress(b"{}") * 2, 400)]
    for coding, content, status in wrong:
        headers = {"content-type": "application/json", "content-encoding": coding}
        with served.http() as http:
            found = http.post("/v1/responses", content=content, headers=headers)
        assert found.status_code == status, (coding, found.text)
        assert "\n" not in found.json()["error"]["message"]


def test_a_bomb_is_decoded_no_further_than_the_limit() -> None:
    for coding in ("zstd", "gzip", "deflate"):
        assert inflated(CODINGS[coding](b"x" * 100), coding, 100) == b"x" * 100
        with pytest.raises(ApiError) as refused:
            inflated(CODINGS[coding](bytes(16 << 20)), coding, 100)
        assert refused.value.status == 413


def test_a_gzip_body_has_several_members() -> None:
    member = gzip.compress(b"x" * 10)
    assert inflated(member * MOST_MEMBERS, "x-gzip", 10_000) == b"x" * 10 * MOST_MEMBERS
    assert inflated(member * 10, "gzip", 100) == b"x" * 100
    for raw, most, status in (
        (member * 10, 99, 413),
        (gzip.compress(b"") * (MOST_MEMBERS + 1), 100, 400),
        (member + b"x", 100, 400),
    ):
        with pytest.raises(ApiError) as refused:
            inflated(raw, "gzip", most)
        assert refused.value.status == status


# --- without an engine ----------------------------------------------------------------------------------


SERVICE = SimpleNamespace(meter=Meter(), model_name=lambda welcome: MODEL)
SIMPLE_CALL: Any = SimpleNamespace(service=SERVICE, id="x", created=1)


class Slow(Response):
    """An answer that begins when it may, and ends with an error."""

    begin: Callable[[], Awaitable[Any]]

    async def events(self) -> AsyncGenerator[tuple[int, ChatEvent], None]:
        await self.begin()
        yield 0, Part("content", "Hello")
        raise ApiError(503, "the engine cancelled this answer: it is shutting down")


async def test_a_long_prompt_is_no_silence_and_a_late_error_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADERS_WITHIN", "PING_SECONDS"):
        monkeypatch.setattr(responses, name, 0.01)
    call: Any = SimpleNamespace(**vars(SIMPLE_CALL), status=200, refusal=lambda error: error)
    client: Any = SimpleNamespace(welcome=WELCOME)
    answer = Slow(call, client, read({"input": "a"}))
    may, events = asyncio.Event(), []
    answer.begin = may.wait
    async for raw in answer.stream():
        events.append(event_type().validate_json(raw.partition(b"data: ")[2]))
        if len(events) == 5:
            may.set()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:5] == ["created", *["in_progress"] * 4]
    assert [kind for kind in kinds[5:] if kind != "in_progress"] == [
        *("output_item.added", "content_part.added", "output_text.delta", "failed")
    ]
    assert events[-1].response.error.message.startswith("the engine cancelled")
    call.status, answer.begin = 0, refuse
    with pytest.raises(ApiError):  # before anything is sent it is an HTTP error
        await anext(answer.stream())


async def refuse() -> None:
    raise ApiError(400, "no")


def test_items_are_read_as_a_chat(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_noted", set())
    monkeypatch.setattr(bodies, "_rate", RateLimiter(100))
    with caplog.at_level(logging.INFO, logger="pipeline.gateway"):
        *_, body = requests()
        request = read(body)
        read(body)
    said = [record.getMessage() for record in caplog.records]
    for kind in ("web_search", "tool_search", "local_shell", "image_generation"):
        assert sum(f"tools of the type {kind!r} " in line for line in said) == 1
    for kind in ("web_search_call", "ghost_snapshot", "compaction", "of_next_year"):
        assert sum(f"items of the type {kind!r} " in line for line in said) == 1
    assert sum("no place for tools" in line for line in said) == 1
    for name in ("text.verbosity", "reasoning.summary", "no reasoning"):
        assert sum(name in line for line in said) == 1
    names = [tool["function"]["name"] for tool in request.tools.given]
    assert names == ["shell_command", "apply_patch", "mcp__notes__find", "mcp__notes__write"]
    assert set(request.tools.schemas) == {*names, "clock", "wait"}
    roles = [turn.role for turn in request.messages]
    assert roles[:2] == ["system", "user"]
    assert "system" not in roles[1:]
    calls = {}
    for turn in request.messages:
        for called in json.loads(turn.extra or "{}").get("tool_calls", ()):
            calls[called["id"]] = (called["function"]["name"], called["function"]["arguments"])
    assert calls["call_1"] == ("shell_command", {"command": "cat a.py"})
    assert calls["call_4"] == ("apply_patch", {"input": PATCH})
    assert calls["call_5"] == ("mcp__notes__find", {"word": "a"})
    assert calls["call_6"] == ("mcp__notes__write", {"input": NOTE_TEXT})
    assert calls["call_7"] == ("local_shell", {"command": ["ls", "-a"]})
    assert calls["call_9"] == ("tool_search", {"query": "time"})
    assert calls["call_11"] == ("clock", {"arguments": '{"zone": "U'})
    results = {json.loads(t.extra)["tool_call_id"]: t.content for t in request.messages if t.role == "tool"}
    assert list(results) == [f"call_{number}" for number in range(1, 12)]
    assert results["call_5"] == "onetwo"
    assert results["call_6"] == "seen:[image left out: only texts can be read here]"
    assert results["call_8"] == "me"
    assert '{"name": "clock", ' in results["call_9"]
    texts = "\n".join(turn.content for turn in request.messages)
    assert texts.count("[image left out") == 2
    assert "/root to /root/b:\nHurry." in texts
    assert '{"name": "wait", ' in texts
    assert "iVBOR" not in texts + "".join(turn.extra for turn in request.messages)
    first = json.loads(request.messages[2].extra)
    assert (request.messages[2].content, len(first["tool_calls"])) == ("I look.", 1)


def test_each_turn_is_the_beginning_of_the_next_one() -> None:
    before: tuple[Any, ...] = ()
    for body in requests():
        now = read(body).messages
        kept = [turn == later for turn, later in zip(before[:-1], now, strict=False)]
        assert all(kept)
        assert len(now) >= len(before)
        if before and before[-1].role == "user":  # what the user adds goes into the same message
            assert now[len(before) - 1].content.startswith(before[-1].content)
        before = now
    assert len(ADDED) == 20


@pytest.mark.parametrize("style", [*STYLES, Style("plain", PLAIN, "", "")], ids=lambda style: style.name)
def test_prompts_of_every_family_begin_as_the_ones_before(style: Style) -> None:
    """But for reasoning, which some leave out before a new question."""
    texts, kind = [], TemplateKind.of_text(style.template)
    for body in requests():
        asked = read(body, kind)
        turns = [{"role": m.role, "content": m.content} | json.loads(m.extra or "{}") for m in asked.messages]
        variables = {"add_generation_prompt": True, "bos_token": ""} | json.loads(asked.template)
        turns = as_template_reads(turns, style.template, variables["tools"])
        ((text,), _) = render_jinja_template([turns], chat_template=style.template, **variables)
        texts.append(text)
    kept = sum(sum(1 for _ in takewhile(bool, map(eq, *pair))) for pair in pairwise(texts))
    assert kept >= 0.95 * sum(map(len, texts[:-1]))


def test_the_systems_messages_in_the_middle_stay_there() -> None:
    items = [message("user", "a"), call(1, "shell_command", command="ls"), output(1, "b")]
    request = read({"input": [*items, message("developer", "c"), message("user", "d")], "tools": TOOLS})
    assert [(turn.role, turn.content) for turn in request.messages[2:]] == [
        ("tool", "b\n\n<system-reminder>\nc\n</system-reminder>"),
        ("user", "d"),
    ]


def test_chats_call_the_same_tools_by_names_of_their_own() -> None:
    free = {"name": "apply_patch", "description": "Edits."}
    grammar = {"syntax": "lark", "definition": "start: x"}
    of_chat = [
        {"type": "custom", "custom": free | {"format": {"type": "grammar", "grammar": grammar}}},
        {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
    ]
    flat = [
        {"type": "custom", **free, "format": {"type": "grammar", **grammar}},
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
    ]
    patch, broken = {"name": "apply_patch", "input": PATCH}, {"name": "f", "arguments": '{"a": 1'}
    called = [
        {"id": "1", "type": "custom", "custom": patch},
        {"id": "2", "type": "function", "function": broken},
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": called}]
    calls = [
        {"type": "custom_tool_call", "call_id": "1"} | patch,
        {"type": "function_call", "call_id": "2"} | broken,
    ]
    for chosen, wanted in (
        ("auto", "auto"),
        ({"type": "custom", "custom": {"name": "apply_patch"}}, {"type": "custom", "name": "apply_patch"}),
    ):
        chat = {"messages": turns, "tools": of_chat, "tool_choice": chosen}
        own = chat_request(fitting(chat, ChatBody, ""), WELCOME, PLAIN_KIND)
        items = {"input": [message("user", "a"), *calls], "tools": flat, "tool_choice": wanted}
        other = read(items)
        assert (own.messages, own.template) == (other.messages, other.template)
        assert (own.settings.shaping, own.tools.schemas) == (other.settings.shaping, other.tools.schemas)
    answer = Chat(SIMPLE_CALL, SimpleNamespace(welcome=WELCOME), own)  # type: ignore[arg-type]
    whole = Whole([Part("call", call=ToolCall("1", "apply_patch", json.dumps({"input": PATCH})))])
    assert answer.body([whole])["choices"][0]["message"]["tool_calls"] == called[:1]


def test_reasoning_comes_back_sealed_and_summaries_open() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed("I see: é")}
    items = [message("user", "a"), thought, message("assistant", "b"), {"type": "compaction_trigger"}]
    request = read({"input": items, "tools": TOOLS[:1]})
    assert json.loads(request.messages[1].extra) == {"reasoning_content": "I see: é"}
    assert (request.messages[-1].role, request.messages[-1].content) == ("user", SUMMARIZE)
    assert request.compacts
    assert request.tools.given  # as in the requests before, whose prompts it begins with
    assert not request.tools.schemas
    for foreign in ("", "gAAAAA", "tandem:%%", "tandem:" + "/" * 8):
        assert unsealed(foreign) == ""


def test_efforts_and_verbosity_are_accepted_by_every_model() -> None:
    for effort in ("none", "minimal", "xhigh", "max", "ultra"):
        body = {"input": "a", "reasoning": {"effort": effort}, "text": {"verbosity": "high"}}
        assert read(body).variables == {}
        assert read(body, TemplateKind(thinks=True)).variables["reasoning_effort"] == effort


def test_only_allowed_tools_are_called_and_all_are_given() -> None:
    given = {"input": "a", "tools": [function("f", a="string"), function("g", a="string")]}
    named = [{"type": "function", "name": "g"}, {"type": "web_search"}]
    for mode, wanted in {"auto": (), "required": ("g",)}.items():
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        request = read(given | {"tool_choice": choice}, TemplateKind(tools=True, calls="json"))
        assert [tool["function"]["name"] for tool in request.tools.given] == ["f", "g"]
        assert (list(request.tools.schemas), request.tools.wanted, request.choice) == (["g"], wanted, choice)
    for wrong in ({"mode": "auto", "tools": [{"name": "h"}]}, {"mode": "any", "tools": named}, {"tools": 1}):
        with pytest.raises(ApiError, match="tool_choice"):
            read(given | {"tool_choice": {"type": "allowed_tools"} | wrong})


def test_tools_of_one_name_are_one_and_those_before_the_conversation_are_given() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [function("g", c="string")]}
    request = read({"input": [added, message("user", "a")], "tools": TOOLS[:1]})
    assert [tool["function"]["name"] for tool in request.tools.given] == ["g", "shell_command"]
    more = added | {"tools": [function("g", d="string"), function("h", e="string")]}
    found = {"type": "tool_search_output", "call_id": "1", "tools": [function("h", x="string")]}
    request = read({"input": [added, more, found, message("user", "a")], "tools": TOOLS[:1]})
    assert [tool["function"]["name"] for tool in request.tools.given] == ["g", "h", "shell_command"]
    assert [list(request.tools.schemas[name]["properties"]) for name in "gh"] == [["c"], ["e"]]
    request = read({"input": "a", "tools": [function("f", a="string"), function("f", b="string")]})
    assert list(request.tools.schemas["f"]["properties"]) == ["a"]


def test_a_namespace_is_no_longer_than_a_name() -> None:
    """Each of its tools has it in its own."""
    tools = [{"type": "function", "name": "f"}]
    with pytest.raises(ApiError, match=r"tools\[0\].name"):
        read({"input": "a", "tools": [{"type": "namespace", "name": "n" * 257, "tools": tools}]})
