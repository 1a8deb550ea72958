"""The packages that people use against a gateway: openai and anthropic, in all the ways they are used. The
model is the embedded one with a chat template that has tools and reasoning."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agent_requests import conversation
from embedded_tokenizer import embedded_tokenizer
from gateway_engine import Served, serve

from pipeline.assets import model_dir
from protocol.client import Client
from protocol.messages import Scores

TEMPLATE = """\
{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}\
<|end|>{% endif %}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}\
{% if enable_thinking %}{{ '<think>' }}{% endif %}{# </think> #}{% endif %}"""
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
QUESTION = [{"role": "user", "content": "What is a list?"}]
MODEL = "chatty"
CONTEXT = 4096  # beyond what the model has learnt, for a conversation of an agent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(model_dir(), folder, copy_function=link_weights)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    with serve("--model", str(folder), "--served-model-name", f"{MODEL},claude-small") as running:
        yield running


def link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        Path(target).symlink_to(source)
    else:
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def check_call(name: str, arguments: str) -> None:
    assert name == "weather"
    found = json.loads(arguments)
    assert found["city"] in ("Oslo", "Rome")
    assert 1 <= found["days"] <= 9


# --- openai -----------------------------------------------------------------------------------------------


def test_tools_are_called_with_valid_arguments(client: Any) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    found = client.chat.completions.create(**asked, temperature=1.3, seed=1).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    (call,) = found.message.tool_calls
    assert call.id
    check_call(call.function.name, call.function.arguments)
    # the whole conversation goes back, as programs do
    turns = [
        *QUESTION,
        found.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=5)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_streamed_tool_calls(client: Any) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS[:1], "tool_choice": "required"}
    with client.chat.completions.stream(**asked, max_tokens=200, seed=2, temperature=1.0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_schema_is_followed_whatever_is_drawn(client: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    for seed in range(4):
        found = client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format=wanted, temperature=2.0, seed=seed, max_tokens=200
        )
        assert found.choices[0].finish_reason == "stop"
        check_call("weather", found.choices[0].message.content)


def test_biases_and_penalties_act(client: Any) -> None:
    ids = embedded_tokenizer().encode(" the")
    found = client.completions.create(
        model=MODEL, prompt="A list", max_tokens=6, temperature=0, logit_bias={str(ids[-1]): 100}
    )
    assert found.choices[0].text == " the" * 6
    found = client.completions.create(
        model=MODEL, prompt="A list", max_tokens=6, temperature=0, logit_bias={str(ids[-1]): 5.0},
        frequency_penalty=2.0, presence_penalty=2.0,
    )  # fmt: skip
    assert found.choices[0].text.count(" the") < 6


def test_log_probabilities_are_those_of_score(client: Any, served: Served) -> None:
    """Of echoed token ids, as lm-evaluation-harness asks; and of new tokens."""
    ids = list(range(40, 60))
    found = client.completions.create(
        model=MODEL, prompt=[ids, ids[:7]], echo=True, logprobs=1, max_tokens=1, temperature=0
    )

    async def score(tokens: list[int]) -> list[Scores]:
        async with Client.connect(served.endpoint) as own:
            return [block async for block in own.score(token_ids=tokens, top=2)]

    for choice, tokens in zip(found.choices, (ids, ids[:7]), strict=True):
        wanted = [float(value) for block in asyncio.run(score(tokens)) for value in block.chosen]
        given = choice.logprobs.token_logprobs
        assert given[0] is None
        assert given[1 : len(tokens)] == wanted
        assert len(given) == len(tokens) + 1
        assert choice.logprobs.top_logprobs[0] is None
        assert max(choice.logprobs.top_logprobs[-1].values()) == given[-1]
        assert choice.text.startswith("".join(choice.logprobs.tokens[:1])) or choice.index >= 0


def test_new_tokens_have_their_log_probabilities(client: Any) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    entries = found.logprobs.content
    assert "".join(entry.token for entry in entries).strip() == found.message.content.strip()
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert bytes(entry.bytes).decode(errors="replace")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    streamed = [
        e for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content
    ]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-3)


def test_completions_stream_many_prompts(client: Any) -> None:
    prompts = ["A list", "A tuple", "A set"]
    whole = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0, n=2)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == list(range(6))
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=6, temperature=0, n=2, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_responses(client: Any) -> None:
    found = client.responses.create(model=MODEL, input="What is a list?", max_output_tokens=8)
    assert found.output_text
    assert found.usage.output_tokens == 8
    assert found.status == "incomplete"
    texts, ended = "", None
    for event in client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be short.", max_output_tokens=8, stream=True
    ):
        if event.type == "response.output_text.delta":
            texts += event.delta
        ended = event
    assert ended is not None
    assert ended.response.output_text == texts
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    called = client.responses.create(
        model=MODEL, input="Rain?", tools=[tool], tool_choice="required", max_output_tokens=200
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    check_call(call.name, call.arguments)
    turns = [
        {"role": "user", "content": "Rain?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "yes"},
    ]
    assert client.responses.create(model=MODEL, input=turns, max_output_tokens=4).output_text is not None


def test_a_response_reads_a_conversation_as_a_chat_does(client: Any) -> None:
    answer = {"role": "assistant", "content": "A sequence."}
    turns = [{"role": "system", "content": "Be short."}, *QUESTION, answer, *QUESTION]
    chat = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=12, temperature=0)
    found = client.responses.create(model=MODEL, input=turns, max_output_tokens=12, temperature=0)
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.output_text == chat.choices[0].message.content


def test_reasoning_is_apart(client: Any) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=QUESTION, reasoning_effort="low", max_tokens=8, temperature=0
    )
    assert found.choices[0].message.reasoning_content
    assert not found.choices[0].message.content
    assert found.usage.completion_tokens_details.reasoning_tokens > 0


def test_errors_are_the_clients_own(client: Any, claude: Any) -> None:
    import anthropic
    import openai

    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "robot", "content": "x"}])
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=QUESTION)
    for name, value in (("suffix", "x"), ("best_of", 3), ("logprobs", 21), ("logit_bias", {"x": 1})):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="x", **{name: value})
        assert refused.value.param == name


# --- anthropic --------------------------------------------------------------------------------------------


def test_messages(claude: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        "system": "Be short.",
    }
    found = claude.messages.create(**asked)
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 12
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == found.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (
        1,
        found.usage.input_tokens + found.usage.cache_read_input_tokens - 1,
    )
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be short.")
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens
    stop = found.content[0].text[3:6]
    stopped = claude.messages.create(**asked, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_a_changing_token_in_the_system_prompt_keeps_the_cache(claude: Any) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Which list?"}], "max_tokens": 4}
    first = claude.messages.create(**asked, system="x-billing: cch=00aa1; Be short and exact.")
    second = claude.messages.create(**asked, system="x-billing: cch=7f3b2; Be short and exact.")
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens == prompt - 1


def test_tools_of_messages(claude: Any) -> None:
    tools = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
    asked = {"model": MODEL, "max_tokens": 200, "tools": tools, "tool_choice": {"type": "any"}}
    with claude.messages.stream(**asked, messages=QUESTION) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (block,) = [block for block in final.content if block.type == "tool_use"]
    check_call(block.name, json.dumps(block.input))
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in final.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]},
    ]
    again = claude.messages.create(model=MODEL, max_tokens=4, tools=tools, messages=turns)
    assert again.content


def test_an_agents_conversation_is_answered_to_its_end(claude: Any, served: Served) -> None:
    """Streamed by Anthropic's client, and whole, in turns; those that are sent at once, at once."""

    def streamed(body: dict[str, Any]) -> dict[str, Any]:
        with claude.beta.messages.stream(**body, betas=["context-management-2025-06-27"]) as stream:
            for event in stream:
                if event.type == "message_start":
                    begun = event.message.usage
            final = stream.get_final_message().model_dump()
        assert (
            begun.input_tokens == final["usage"]["input_tokens"] + final["usage"]["cache_read_input_tokens"]
        )
        return dict(final)

    def whole(body: dict[str, Any]) -> dict[str, Any]:
        with served.http() as http:
            answer = http.post("/v1/messages?beta=true", json=body | {"stream": False})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

    lengths = []
    with ThreadPoolExecutor(4) as pool:
        for number, bodies in enumerate(conversation()):
            for answer in pool.map(whole if number % 2 else streamed, bodies):
                thinks = bodies[0]["thinking"]["type"] != "disabled"
                assert {block["type"] for block in answer["content"]} <= {"thinking" if thinks else "text"}
                assert answer["usage"]["output_tokens"] <= 4
                lengths.append(answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"])
    last = {name: bodies[0][name] for name in ("model", "messages", "system", "tools", "thinking")}
    assert claude.messages.count_tokens(**last).input_tokens == lengths[-1]


def test_the_model_has_the_names_that_it_is_given(client: Any, claude: Any, served: Served) -> None:
    import anthropic
    import openai

    names = [MODEL, "claude-small"]
    assert [entry.id for entry in client.models.list()] == names
    assert client.models.retrieve(names[1]).context_length == CONTEXT
    entries = list(claude.models.list(limit=1000))
    assert [(entry.id, entry.type, entry.max_input_tokens) for entry in entries] == [
        (name, "model", CONTEXT) for name in names
    ]
    assert claude.models.retrieve(names[1]).created_at == entries[0].created_at
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.models.retrieve("other")
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with served.http() as http:
        assert (http.head("/").status_code, http.head("/").content) == (200, b"")


# --- the rest ---------------------------------------------------------------------------------------------


def test_metrics_are_what_a_prometheus_parser_reads(served: Served, client: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        with served.http() as http:
            families = list(text_string_to_metric_families(http.get("/metrics").text))
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    before = read()
    client.completions.create(model=MODEL, prompt="A list of", max_tokens=5, temperature=0)
    after = read()
    assert after["tandem_up"] == 1
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 5
    assert after["tandem_requests_ended_total"] - before["tandem_requests_ended_total"] == 1
    assert after["vllm:time_to_first_token_seconds_count"] > before["vllm:time_to_first_token_seconds_count"]
    assert after["vllm:num_requests_running"] == 0
