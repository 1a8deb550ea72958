"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pipeline.gateway.call import Call
from pipeline.gateway.choices import Usage, events_of
from pipeline.gateway.conversation import cache_name, take_messages
from pipeline.gateway.errors import ApiError
from pipeline.gateway.responses import event_of
from pipeline.gateway.settings import Settings, note_unknown, take_settings
from pipeline.gateway.status import check_model, model_name
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import ChatMessage, Done

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[ChatMessage, ...]
    settings: Settings
    conversation: str

    def ask(self, client: Client) -> list[Answer]:
        """Send one request for each choice."""
        return [
            client.generate(
                messages=self.messages,
                conversation=f"{self.conversation}/{index}",
                **self.settings.of_choice(index),
            )
            for index in range(self.settings.choices)
        ]


async def completions(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    welcome = client.welcome
    check_model(fields.text("model", None), welcome)
    if not welcome.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions")
    messages = take_messages(fields)
    most = fields.integer("max_tokens", 1, 1 << 31, welcome.context)
    most = fields.integer("max_completion_tokens", 1, 1 << 31, most)
    settings = take_settings(fields, welcome, most)
    request = ChatRequest(messages, settings, cache_name(messages))
    note_unknown(fields, "/v1/chat/completions")
    maker = _Maker(call, client, request)
    if settings.stream:
        await call.stream(maker.stream())
    else:
        await call.answer(maker.whole())


class _Maker:
    """The answer to one request, in chunks or as a whole."""

    def __init__(self, call: Call, client: Client, request: ChatRequest) -> None:
        self._client = client
        self._request = request
        self._head = {
            "id": f"chatcmpl-{call.id}",
            "created": call.created,
            "model": model_name(client.welcome),
        }

    async def whole(self) -> dict[str, Any]:
        answers = self._request.ask(self._client)
        usage, choices = Usage(), []
        async with aclosing(events_of(answers)) as events:
            async for place, event in events:
                if isinstance(event, Done):
                    answer = answers[place]
                    usage.add(answer, new_prompt=place == 0)
                    choices.append((place, _choice(place, (await answer.result()).text, event)))
        choices.sort(key=lambda choice: choice[0])
        found = [choice for _, choice in choices]
        return self._head | {"object": "chat.completion", "choices": found, "usage": usage.openai()}

    async def stream(self) -> AsyncIterator[bytes]:
        answers = self._request.ask(self._client)
        usage = Usage()
        begun: set[int] = set()
        async with aclosing(events_of(answers)) as events:
            async for place, event in events:
                if place not in begun:
                    begun.add(place)
                    yield self._chunk(place, {"role": "assistant", "content": ""})
                if event.text:
                    yield self._chunk(place, {"content": event.text})
                if isinstance(event, Done):
                    usage.add(answers[place], new_prompt=place == 0)
                    yield self._chunk(place, {}, event.reason)
        if self._request.settings.include_usage:
            yield self._event({"choices": [], "usage": usage.openai()})
        yield DONE

    def _chunk(self, place: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return self._event(
            {"choices": [{"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        )

    def _event(self, content: dict[str, Any]) -> bytes:
        return event_of(self._head | {"object": "chat.completion.chunk"} | content)


def _choice(place: int, text: str, done: Done) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": place, "message": message, "logprobs": None, "finish_reason": done.reason}
