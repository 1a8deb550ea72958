"""Conversations and tools of Anthropic's API as chat templates read them. A program sends its whole
conversation with every request, so nothing in one is refused for being of an unknown kind: that would end it.

What a conversation adds stays where it was added, so that each prompt is the beginning of the next one: a
system message in its middle is said there, on the user's side, and there a deferred tool is described."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from pipeline.gateway.answers import turn
from pipeline.gateway.bodies import (
    UNREAD,
    CustomTool,
    Function,
    MessageTurn,
    Object,
    ResultBlock,
    ThinkingBlock,
    UseBlock,
    fitting,
    note_once,
)
from pipeline.gateway.errors import bad
from pipeline.gateway.steady import without_bookkeeping
from protocol.messages import ChatMessage

Content = str | list[Object] | None

REMINDER = "<system-reminder>"
# Of a provider's own tools, and of what it keeps for itself, in its answers.
PROVIDERS = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "fallback", "compaction")

_STRING, _NUMBER, _SWITCH = ({"type": name} for name in ("string", "integer", "boolean"))
_SHELL = {"command": _STRING, "restart": _SWITCH | {"description": "start the shell again instead"}}
_EDITS = {
    "command": {"enum": ["view", "create", "str_replace", "insert"]},
    "path": _STRING,
    "file_text": _STRING | {"description": "of create"},
    "old_str": _STRING | {"description": "of str_replace; occurs once in the file"},
    "new_str": _STRING | {"description": "of str_replace"},
    "insert_line": _NUMBER | {"description": "of insert; the line behind which it is"},
    "insert_text": _STRING | {"description": "of insert"},
    "view_range": {"type": "array", "items": _NUMBER, "description": "of view; the first and last line"},
}
_NOTES = _EDITS | {
    "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
    "old_path": _STRING | {"description": "of rename"},
    "new_path": _STRING | {"description": "of rename"},
}
# Tools that clients run but do not describe, as their provider's models know them; by how the type begins.
KNOWN_TOOLS = {
    "bash_": ("Runs a command in a shell that is kept between calls.", _SHELL),
    "text_editor_": ("Views and edits files.", _EDITS),
    "memory_": ("Views and edits files of notes below /memories, kept between conversations.", _NOTES),
}


class Catalogue:
    """The tools of a request. `given`: those that the prompt begins with; `deferred`: those that the model
    learns of where the conversation names them; `skipped`: names of those that only the provider runs."""

    def __init__(self, tools: Iterable[Object]) -> None:
        self.given: list[Function] = []
        self.deferred: dict[str, Function] = {}
        self.skipped: set[str] = set()
        self._told: set[str] = set()
        searched = False  # by the provider, so that nobody names deferred ones here
        for place, tool in enumerate(tools):
            function = self._function(tool, f"tools[{place}]")
            if function is None:
                searched |= str(tool.get("type")).startswith("tool_search_")
            elif tool.get("defer_loading"):
                self.deferred[function.name] = function
            else:
                self.given.append(function)
        if searched:
            self.given += self.deferred.values()
            self.deferred = {}

    def _function(self, tool: Object, where: str) -> Function | None:
        kind = tool.get("type") or "custom"
        if kind == "custom" or "input_schema" in tool:
            custom = fitting(tool, CustomTool, where)
            return Function(custom.name, custom.description, custom.input_schema)
        name = tool.get("name")
        if isinstance(kind, str) and isinstance(name, str):
            for beginning, (description, properties) in KNOWN_TOOLS.items():
                if kind.startswith(beginning):
                    return Function(name, description, {"type": "object", "properties": properties})
            self.skipped.add(name)
        kind = str(kind)[:40]
        note_once(f"tools of the type {kind} are run by their provider only: left out", logging.WARNING)
        return None

    def define(self, tool: Object, where: str) -> str:
        """Add a tool that the conversation defines. Returns what the model is told. Raises ApiError."""
        function = self._function(tool, where)
        if function is None:
            return ""
        self.deferred[function.name] = function
        self._told.discard(function.name)
        return self.described(function.name)

    def described(self, name: str) -> str:
        """Returns what the model is told where a conversation makes a tool available: the first time all of
        it, as a name of some bytes may stand for megabytes, and a conversation may have it very often."""
        function = self.deferred.get(name)
        if function is None or name in self._told:
            return f"[The function {name} can be called.]"
        self._told.add(name)
        what = {"description": function.description or "", "parameters": function.parameters}
        return "This function can be called, too:\n" + json.dumps({"name": name} | what, ensure_ascii=False)

    @property
    def functions(self) -> list[Function]:
        """Returns all that can be called."""
        return [*self.given, *self.deferred.values()]


class Turns:
    """The messages of a conversation. What is said behind the last one is joined to it only when the next one
    comes: there may be thousands of such texts. `begun`: there is one that is not of the system."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._more: list[str] = []  # behind the last message
        self.begun = False

    def append(self, message: ChatMessage) -> None:
        """Add a message."""
        self._join()
        self._messages.append(message)
        self.begun |= message.role != "system"

    def extend_last(self, texts: Iterable[str]) -> None:
        """Add texts to the last message, of which there is one."""
        self._more += texts

    @property
    def role(self) -> str:
        """Returns the last message's role, "" where there is no message."""
        return self._messages[-1].role if self._messages else ""

    def all(self) -> list[ChatMessage]:
        """Returns the messages."""
        self._join()
        return self._messages

    def _join(self) -> None:
        if self._more:
            last = self._messages[-1]
            self._messages[-1] = replace(last, content="\n\n".join(filter(None, (last.content, *self._more))))
            self._more = []


class Conversation:
    """The turns of a request's messages, added in order."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.turns = Turns()
        self._catalogue = catalogue
        self._called = False  # by the last answer, whose results are still missing
        self._late: list[str] = []  # of the system, before these results

    def add_system(self, content: Content, where: str = "system") -> None:
        """Add the system's text: the first of all, or in the middle. Raises ApiError."""
        texts = [without_bookkeeping(text) for text in self._texts(_blocks(content), where)]
        if not self.turns.begun:
            if text := "\n\n".join(filter(None, texts)):
                self._say("system", text)
            return
        texts = [reminder(text) for text in texts]
        if self._called:
            self._late += texts
        else:
            self._remind(texts)

    def add(self, message: MessageTurn, where: str) -> None:
        """Add a message. Raises ApiError for a block that is broken."""
        add = {"system": self.add_system, "assistant": self._answer, "user": self._ask}
        add[message.role](message.content, f"{where}.content")

    def _answer(self, content: Content, where: str) -> None:
        """Add what the model has said."""
        texts: list[str] = []
        extra: Object = {}
        for place, block in enumerate(_blocks(content)):
            at = f"{where}[{place}]"
            match block.get("type"):
                case "thinking":
                    thinking = fitting(block, ThinkingBlock, at).thinking
                    extra["reasoning_content"] = extra.get("reasoning_content", "") + thinking
                case "tool_use":
                    used = fitting(block, UseBlock, at)
                    function = {"name": used.name, "arguments": used.input or {}}
                    calls = extra.setdefault("tool_calls", [])
                    calls.append({"id": used.id, "type": "function", "function": function})
                case "text" | "compaction":
                    texts.append(self._text(block, at))
                case kind:  # what a provider has done and seen in its own answer
                    note_once(f"blocks of the type {str(kind)[:40]} in an answer are left out")
        self.end()
        self._called = "tool_calls" in extra
        self.turns.append(turn("assistant", "".join(texts), extra))

    def _ask(self, content: Content, where: str) -> None:
        """Add results of tools, each a message of its own, and what the user says behind them."""
        texts: list[str] = []
        reminders: list[str] = []
        results = 0
        for place, block in enumerate(_blocks(content)):
            at = f"{where}[{place}]"
            if block.get("type") == "tool_result":
                result = fitting(block, ResultBlock, at)
                told = "\n\n".join(self._texts(_blocks(result.content), f"{at}.content"))
                self.turns.append(turn("tool", told, {"tool_call_id": result.tool_use_id}))
                results += 1
                continue
            text = self._text(block, at)
            # With a result it is no question of the user, before which templates leave earlier reasoning out.
            (reminders if results and text.startswith(REMINDER) else texts).append(text)
        self._remind(reminders)
        if texts or not results:
            self._say("user", "\n\n".join(texts))
        self._called = False
        self.end()

    def end(self) -> None:
        """Add what waits for results of tools."""
        self._remind(self._late)
        self._late = []

    def _say(self, role: str, text: str) -> None:
        """Add a message, or to the last one, if it is of this role."""
        if self.turns.role == role:
            self._remind([text])
        else:
            self.turns.append(turn(role, text))

    def _remind(self, texts: list[str]) -> None:
        """Add texts behind the last message of the user's side, or as one."""
        if not texts:
            return
        if self.turns.role == "assistant":
            self.turns.append(turn("user", "\n\n".join(texts)))
            return
        self.turns.extend_last(texts)

    def _texts(self, blocks: list[Object], where: str) -> list[str]:
        texts = [self._text(block, f"{where}[{place}]") for place, block in enumerate(blocks)]
        return [text for text in texts if text]

    def _text(self, block: Object, where: str) -> str:
        """Returns a block as text. Raises ApiError."""
        match block:
            case {"type": "text", "text": str(text)} | {"type": "compaction", "content": str(text)}:
                return text
            case {"type": "text"}:
                raise bad(f"{where}.text", "is required, a string")
            case {"type": "document", "source": {"type": "text", "data": str(text)}}:
                return text
            case {"type": "document", "source": {"type": "content", "content": str() | list() as content}}:
                return "\n\n".join(self._texts(_blocks(content), f"{where}.source.content"))
            case {"type": "search_result", "content": list(parts)}:
                title = f"{block.get('title')} ({block.get('source')})"
                return "\n".join((title, *self._texts(_blocks(parts), f"{where}.content")))
            case {"type": "tool_reference", "tool_name": str(name)}:
                return self._catalogue.described(name)
            case {"type": "tool_addition", "tool": {"definition": dict(tool)}}:
                return self._catalogue.define(tool, f"{where}.tool.definition")
            case {"type": "tool_addition", "tool": {"name": str(name)}}:
                return self._catalogue.described(name)
            case {"type": "tool_removal", "tool": {"name": str(name)}}:
                return f"[The function {name} cannot be called any more.]"
            case {"type": str(kind)} if kind in PROVIDERS:
                return ""
            case {"type": str(kind)}:
                kind = kind[:40]
                note_once(f"blocks of the type {kind} are left out, named in the prompt", logging.WARNING)
                return UNREAD.format(kind)
        raise bad(f"{where}.type", "is required, a string")


def reminder(text: str) -> str:
    """Returns what the system says in the middle of a conversation, as it is said on the user's side."""
    return text if text.startswith("<") else f"{REMINDER}\n{text}\n</{REMINDER[1:]}"


def _blocks(content: Content | list[Any]) -> list[Object]:
    """Returns the blocks of a content; a text is one."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []
