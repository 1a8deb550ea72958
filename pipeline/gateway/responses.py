"""POST /v1/responses and /v1/responses/compact: OpenAI's newer API, as coding agents use it: a chat without
state, as nothing is kept between requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipeline.gateway.answers import ChatAnswer, ChatEvent, End, Whole
from pipeline.gateway.bodies import Object
from pipeline.gateway.call import HEADERS_WITHIN, PING_SECONDS, Call, event_of
from pipeline.gateway.errors import TOO_LONG, ApiError
from pipeline.gateway.response_items import sealed
from pipeline.gateway.response_request import ResponseRequest, ResponsesBody, response_request
from pipeline.gateway.settings import Origin, free_input
from pipeline.text.chat_output import Part
from protocol.client import Client

Event = tuple[str, Object]

# By the kind of a part: of which event the deltas are, and its field with the whole text.
FIELDS = {
    "reasoning": ("reasoning_text", "text"),
    "content": ("output_text", "text"),
    "call": ("function_call_arguments", "arguments"),
    "free call": ("custom_tool_call_input", "input"),
}
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of a failed response, by status


async def create(call: Call) -> None:
    """Answer a conversation."""
    client = await call.client()
    welcome, template = client.welcome, call.service.template
    said, request = await call.body(
        ResponsesBody, lambda body: (bool(body.input), response_request(body, welcome, template))
    )
    call.keep(request.given)
    answer = Compaction if request.compacts else Response if said else Probed
    await answer(call, client, request).send()


async def compact(call: Call) -> None:
    """Answer with a shorter conversation: the user's last messages, and a summary of all."""
    client = await call.client()
    welcome, template = client.welcome, call.service.template

    def made(body: ResponsesBody) -> tuple[ResponseRequest, list[Object]]:
        body.stream = None
        items = [] if isinstance(body.input, str) else body.input
        request = response_request(body, welcome, template, compacts=True)
        return request, _questions(items, welcome.context // 2)

    request, questions = await call.body(ResponsesBody, made)
    call.keep((request.given, questions))
    await Compacted(call, client, request, questions).send()


def _questions(items: list[Object], most: int) -> list[Object]:
    """Returns the user's last messages, of so many characters in JSON at most."""
    found: list[Object] = []
    for item in reversed(items):
        if item.get("role") == "user":
            most -= len(str(item.get("content")))
            if most < 0:
                break
            found.append(item)
    return found[::-1]


class Response(ChatAnswer):
    """The answer. Its output is items: reasoning, messages and calls of tools."""

    request: ResponseRequest

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer."""
        (whole,) = choices
        last = len(whole.blocks) - 1
        output = [
            self._item(place, block, _status(whole) if place == last else "completed")
            for place, block in enumerate(whole.blocks)
        ]
        return self._body(_status(whole), output, self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields numbered events."""
        number = 0
        async with aclosing(self._lively()) as events:
            async for kind, value in events:
                yield _event(kind, value, number)
                number += 1

    async def _lively(self) -> AsyncGenerator[Event, None]:
        """Yields the events with signs of life, as Codex counts no comments and gives up after minutes. An
        error behind the first event is one, too, and so is a prompt that is too long: by that Codex knows
        that it has to make its conversation shorter."""
        body, begun = {"response": self._body("in_progress", [], None)}, False
        try:
            async with aclosing(_patient(self._told())) as told:
                async for event in told:
                    if not begun:
                        begun = True
                        yield "response.created", body
                        yield "response.in_progress", body
                    elif event is None:
                        yield "response.in_progress", body
                    if event is not None:
                        yield event
        except Exception as e:
            error = self.call.refusal(e)
            if not self.call.status and error.code != TOO_LONG:
                raise
            if not begun:
                yield "response.created", body
            code = error.code or CODES.get(error.status, "server_error")
            failed = {"error": {"code": code, "message": str(error)}}
            yield "response.failed", {"response": self._body("failed", [], None) | failed}

    async def _told(self) -> AsyncGenerator[Event, None]:
        """Yields all but that the response begins."""
        whole = Whole()
        async with aclosing(self.changes(whole)) as changes:
            async for change, place, part in changes:
                # What closes before the end is known is followed by more
                status = _status(whole) if change == "close" else "in_progress"
                for event in self._events(change, place, part, status):
                    yield event
        yield f"response.{_status(whole)}", {"response": self.body([whole])}

    def _body(self, status: str, output: list[Object], usage: Object | None) -> Object:
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": self.request.tools.parallel,
            "tool_choice": self.request.choice,
            "tools": list(self.request.given),
            "store": False,
            "usage": usage,
        }

    def _usage(self) -> Object:
        usage = self.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _item(self, place: int, part: Part, status: str) -> Object:
        """Returns a whole item of the output, or the empty one that a part in progress begins."""
        name, whole = f"{self.call.id}_{place}", status != "in_progress"
        if part.call is not None:
            kind, text = self._said(part)
            origin = self._origin(part)
            start, type_ = ("ctc", "custom_tool_call") if origin.free else ("fc", "function_call")
            item: Object = {"id": f"{start}_{name}", "type": type_, "call_id": part.call.id}
            item |= {"name": origin.name, FIELDS[kind][1]: text if whole else ""}
            item["status"] = "completed" if whole else status  # a call is there only when it is complete
            return item if origin.namespace is None else item | {"namespace": origin.namespace}
        if part.kind == "reasoning":
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": []}
            if whole:
                item["content"] = [{"type": "reasoning_text", "text": part.text}]
            if self.request.seals:
                item["encrypted_content"] = sealed(part.text) if whole else None
            return item
        item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        return item | {"content": [_part(part.text)] if whole else []}

    def _origin(self, part: Part) -> Origin:
        assert part.call is not None
        return self.request.origins[part.call.name]

    def _said(self, part: Part) -> tuple[str, str]:
        """Returns the kind of a part, of FIELDS, and its text."""
        if part.call is None:
            return part.kind, part.text
        if self._origin(part).free:
            return "free call", free_input(part.call.arguments)
        return "call", part.call.arguments

    def _events(self, change: str, place: int, part: Part, status: str) -> list[Event]:
        """Returns the names and values of what the stream says of a change of its blocks. `status`: of the
        item after it."""
        if change == "start":
            return []
        item = self._item(place, part, status)
        kind, text = self._said(part)
        name, field = FIELDS[kind]
        where = {"output_index": place, "item_id": item["id"]}
        if part.call is None:
            where["content_index"] = 0
        of_content: Object = {"logprobs": []} if part.kind == "content" else {}
        if change == "more":
            return [(f"response.{name}.delta", where | {"delta": text} | of_content)]
        state = "done" if change == "close" else "added"
        events = [(f"response.output_item.{state}", {"output_index": place, "item": item})]
        if part.kind == "content":
            shown = _part(text if change == "close" else "")
            events.insert(change == "open", (f"response.content_part.{state}", where | {"part": shown}))
        if change == "close":
            called = {"name": item["name"]} if kind == "call" else {}
            events.insert(0, (f"response.{name}.done", where | {field: text} | of_content | called))
        return events


class Probed(Response):
    """The answer to a request without a conversation, by which a program finds out who is here."""

    async def events(self) -> AsyncGenerator[tuple[int, ChatEvent], None]:
        """Yields the end: nothing is computed."""
        yield 0, End("stop")


class Compaction(Response):
    """A summary of the conversation, as one item that the client keeps for us without reading it."""

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer. Raises ApiError where there is no summary."""
        (whole,) = choices
        return self._body("completed", [self._summary(whole)], self._usage())

    async def _told(self) -> AsyncGenerator[Event, None]:
        whole = Whole()
        async with aclosing(self.changes(whole)) as changes:
            async for _ in changes:
                pass
        item = {"output_index": 0, "item": self._summary(whole)}
        yield "response.output_item.added", item
        yield "response.output_item.done", item
        yield "response.completed", {"response": self.body([whole])}

    def _summary(self, whole: Whole) -> Object:
        text = whole.text("content").strip() or whole.text("reasoning").strip()
        if not text:
            raise ApiError(500, "the model has written no summary")
        return {"id": f"cmp_{self.call.id}", "type": "compaction", "encrypted_content": sealed(text)}


class Compacted(Compaction):
    """The conversation that is left. `questions`: the user's messages in it."""

    def __init__(self, call: Call, client: Client, request: ResponseRequest, questions: list[Object]) -> None:
        super().__init__(call, client, request)
        self._questions = questions

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer. Raises ApiError where there is no summary."""
        (whole,) = choices
        head = {
            "id": f"resp_{self.call.id}",
            "object": "response.compaction",
            "created_at": self.call.created,
        }
        return head | {"output": [*self._questions, self._summary(whole)], "usage": self._usage()}


async def _patient(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event | None, None]:
    """Yields the events, and None whenever there has been none for a while."""
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(1)  # what waits is counted before

    async def read() -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    await queue.put(event)
            await queue.put(None)
        except Exception as e:
            await queue.put(e)

    reading = asyncio.create_task(read())
    seconds = HEADERS_WITHIN
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    event = await queue.get()
            except TimeoutError:
                yield None
            else:
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    return
                yield event
            seconds = PING_SECONDS
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _status(whole: Whole) -> str:
    return "incomplete" if whole.reason == "length" else "completed"


def _event(kind: str, value: Object, number: int) -> bytes:
    return event_of({"type": kind, "sequence_number": number} | value, kind)


def _part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
