"""A conversation in the items of OpenAI's responses, as Codex and others write it, and how a chat template
reads it. A program sends the whole of it each time, so an item of an unknown kind is left out, with a line in
the log: refusing it would end the conversation."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from pipeline.gateway.answers import rendered_call, turn
from pipeline.gateway.bodies import (
    CalledFunction,
    CallPart,
    Content,
    Function,
    Object,
    ToolObjects,
    fitting,
    note_once,
)
from pipeline.gateway.conversations import Turns, reminder
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import Functions, flat_tools, functions_of, joined

SEAL = "tandem:"  # before a text in Base64 that goes to the client and comes back
SUMMARY = "This is a summary of the conversation so far, of which the earlier messages are left out:\n\n"


def sealed(text: str) -> str:
    """Returns a text as a client keeps it for us, without reading it."""
    return SEAL + base64.b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """Returns the text of what `sealed` made; "" for what another server made."""
    try:
        return base64.b64decode(text.removeprefix(SEAL), validate=True).decode() * text.startswith(SEAL)
    except ValueError:
        return ""


class MessageItem(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None


class AgentItem(Struct):
    """What one agent has written to another."""

    author: str
    recipient: str
    content: Content = None


class CallItem(Struct):
    call_id: str
    name: str
    arguments: str | Object
    namespace: str | None = None


class FreeCallItem(Struct):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ShellCallItem(Struct):
    action: Object
    call_id: str | None = None
    id: str | None = None


class SearchCallItem(Struct):
    arguments: Any = None
    call_id: str | None = None


class OutputItem(Struct):
    call_id: str | None = None
    id: str | None = None
    output: Content = None


class ToolsItem(Struct):
    """Tools that a conversation adds: found by a search, or given in it."""

    tools: ToolObjects
    call_id: str | None = None


class ReasoningText(Struct):
    text: str = ""


class ReasoningItem(Struct):
    """Reasoning of an earlier answer, which the template may keep. Codex sends back `encrypted_content`
    alone."""

    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class SummaryItem(Struct):
    encrypted_content: str | None = None


CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
SUMMARIES = ("compaction", "compaction_summary", "context_compaction")


def called(kind: str, value: Object, where: str) -> Object:
    """Returns an item that calls a tool, as chat templates read it. Raises ApiError."""
    arguments: str | Object
    match kind:
        case "function_call":
            item = fitting(value, CallItem, where)
            name, arguments, call_id = joined(item.namespace, item.name), item.arguments, item.call_id
        case "custom_tool_call":
            free = fitting(value, FreeCallItem, where)
            name, arguments, call_id = joined(free.namespace, free.name), {"input": free.input}, free.call_id
        case "local_shell_call":
            shell = fitting(value, ShellCallItem, where)
            arguments = {
                key: said for key, said in shell.action.items() if said is not None and key != "type"
            }
            name, call_id = "local_shell", shell.call_id or shell.id or ""
        case _:
            search = fitting(value, SearchCallItem, where)
            arguments = (
                search.arguments if isinstance(search.arguments, dict) else {"query": search.arguments}
            )
            name, call_id = "tool_search", search.call_id or ""
    return rendered_call(CallPart(CalledFunction(name, arguments), call_id), where)


@dataclass
class Conversation:
    """A conversation, added item by item. `known`: the functions that can be called, of which `given` are
    told at the beginning: the others are told where the conversation adds them, so that each prompt begins as
    the one before. `compacts`: it asks for a summary of itself."""

    known: Functions
    turns: Turns = field(default_factory=Turns)
    given: list[Function] = field(init=False)
    compacts: bool = False
    # What the model wrote at once, which templates read as one message
    _reasoning: str = ""
    _content: Content = None
    _calls: list[Object] = field(default_factory=list)
    _before: list[Functions] = field(default_factory=list)  # that it adds before it begins, not known yet

    def __post_init__(self) -> None:
        self.given = [function for function, _ in self.known.values()]

    def add_all(self, items: Iterable[Object]) -> None:
        """Add items of a request's `input`. Raises ApiError for one that is broken."""
        for place, value in enumerate(items):
            where = f"input[{place}]"
            kind = value.get("type") or "message"
            if not isinstance(kind, str):
                raise bad(f"{where}.type", "must be a string")
            self._add(kind, value, where)
        self._end()
        self._know()

    def say(self, role: str, content: Content) -> None:
        """Add a message to the model. One of the system in the middle belongs to what the model answers next,
        as most templates take one at the beginning only. Neighbours of one role are one message."""
        self._end()
        said = turn(role, content)
        if said.role == "system" and self.turns.begun:
            role = "tool" if self.turns.role == "tool" else "user"
            said = replace(said, role=role, content=reminder(said.content))
        if self.turns.role == said.role:
            self.turns.extend_last((said.content,))
        else:
            self.turns.append(said)

    def _add(self, kind: str, value: Object, where: str) -> None:
        match kind:
            case "message":
                message = fitting(value, MessageItem, where)
                if message.role != "assistant":
                    self.say(message.role, message.content)
                    return
                if self._said:
                    self._end()
                self._content = message.content or ""
            case "agent_message":
                letter = fitting(value, AgentItem, where)
                self.say(
                    "user", f"{letter.author} to {letter.recipient}:\n{turn('user', letter.content).content}"
                )
            case "reasoning":
                if self._said:
                    self._end()
                thought = fitting(value, ReasoningItem, where)
                texts = "".join(part.text for part in thought.content or ())
                self._reasoning += texts or unsealed(thought.encrypted_content or "")
            case _ if kind in CALLS:
                self._calls.append(called(kind, value, where))
            case _ if kind in OUTPUTS:
                result = fitting(value, OutputItem, where)
                self._result(result.call_id or result.id, result.output)
            case "tool_search_output":
                found = fitting(value, ToolsItem, where)
                self._result(found.call_id, self._described(found.tools, where))
            case "additional_tools":
                added = fitting(value, ToolsItem, where).tools
                if not self.turns.begun:
                    self._before.append(functions_of(added, f"{where}.tools"))
                else:
                    self.say("system", self._described(added, where))
            case "compaction_trigger":
                self.compacts = True
            case "item_reference":
                raise bad(where, "refers to an item of another request, of which nothing is kept here")
            case _ if kind in SUMMARIES and (
                text := unsealed(fitting(value, SummaryItem, where).encrypted_content or "")
            ):
                self.say("user", SUMMARY + text)
            case _:
                note_once(f"items of the type {kind[:40]!r} in a conversation are left out", logging.WARNING)

    def _know(self) -> None:
        """Give the functions that were added before the conversation, the last ones first. Of those with one
        name the first that came counts. All at once: there may be thousands of such items."""
        if self._before:
            earlier, self.known = self.known, {}
            for functions in (*reversed(self._before), earlier):
                self.known |= functions
            self.given = [function for function, _ in self.known.values()]
            self._before = []

    def _described(self, tools: list[Object], where: str) -> str:
        """Add functions to those that can be called. Returns what the model is told of them."""
        self._know()
        added = functions_of(tools, f"{where}.tools")
        for name, function in added.items():  # in place: there may be thousands of such items
            self.known.setdefault(name, function)
        shown, _ = flat_tools(function for function, _ in added.values())
        texts = [json.dumps(tool["function"], ensure_ascii=False) for tool in shown]
        return (
            "\n".join(("These functions can be called, too:", *texts)) if texts else "No function is found."
        )

    def _result(self, call_id: str | None, content: Content) -> None:
        self._end()
        self.turns.append(turn("tool", content, {"tool_call_id": call_id or ""}))

    @property
    def _said(self) -> bool:
        return self._content is not None or bool(self._calls)

    def _end(self) -> None:
        """Add the model's message, if there is a text or a call in it."""
        if self._said:
            extra = {"reasoning_content": self._reasoning, "tool_calls": self._calls}
            given = {name: value for name, value in extra.items() if value}
            self.turns.append(turn("assistant", self._content, given))
        self._reasoning, self._content, self._calls = "", None, []
