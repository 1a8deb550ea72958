"""A conversation of 20 turns as Codex writes it: the whole of it with each request, with every kind of tool
and item that it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
MODEL = "plain"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}
PATCH = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n*** End Patch"
NOTE_TEXT = "A note."


def schema(**properties: str) -> Object:
    given = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": given, "required": list(given), "additionalProperties": False}


def function(name: str, **properties: str) -> Object:
    return {
        "type": "function",
        "name": name,
        "description": f"The tool {name}.",
        "strict": False,
        "parameters": schema(**properties),
    }


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
FREE = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
NOTES = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Notes of the user.",
    "tools": [
        function("find", word="string"),
        {"type": "custom", "name": "write", "description": "Writes one."},
    ],
}
TOOLS: list[Object] = [
    function("shell_command", command="string"),
    FREE,
    NOTES,
    {"type": "web_search", "external_web_access": True},
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": schema(query="string"),
    },
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
]


def message(role: str, *content: str | Object) -> Object:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": part} if isinstance(part, str) else part for part in content]
    return {"type": "message", "role": role, "content": parts}


def call(number: int, name: str, namespace: str | None = None, **arguments: Any) -> Object:
    item = {
        "type": "function_call",
        "call_id": f"call_{number}",
        "name": name,
        "arguments": json.dumps(arguments),
    }
    return item if namespace is None else item | {"namespace": namespace}


def output(number: int, value: Any, kind: str = "function_call") -> Object:
    return {"type": f"{kind}_output", "call_id": f"call_{number}", "output": value}


def free_call(number: int, name: str, text: str, **more: str) -> Object:
    item = {"type": "custom_tool_call", "status": "completed", "call_id": f"call_{number}", "name": name}
    return item | {"input": text} | more


def reasoning(**content: Any) -> Object:
    summary = [{"type": "summary_text", "text": "**Thinking**"}]
    return {"type": "reasoning", "summary": summary, "encrypted_content": None} | content


def text_output(*texts: str) -> list[Object]:
    return [{"type": "input_text", "text": text} for text in texts]


# What each turn adds behind the answer of the one before.
ADDED: list[list[Object]] = [
    [
        message("developer", "<permissions instructions>\nAll is allowed.\n</permissions instructions>"),
        message("user", "# AGENTS.md instructions\nBe short."),
        message("user", "<environment_context>\n<cwd>/w</cwd>\n</environment_context>"),
        message("user", "What is in a.py?"),
    ],
    [
        reasoning(encrypted_content="gAAAAABofAnotherServer"),
        message("assistant", "I look.") | {"phase": "commentary"},
        call(1, "shell_command", command="cat a.py"),
        output(1, "Exit code: 0\nOutput:\nx = 2\n"),
    ],
    [
        *(call(2, "shell_command", command="ls"), call(3, "shell_command", command="pwd")),
        *(output(2, "a.py"), output(3, "/w")),
    ],
    [free_call(4, "apply_patch", PATCH), output(4, "Success.", "custom_tool_call")],
    [message("assistant", "Done.") | {"phase": "final_answer"}, message("user", "And this?", IMAGE)],
    [call(5, "find", "mcp__notes", word="a"), output(5, text_output("one", "two"))],
    [
        free_call(6, "write", NOTE_TEXT, namespace="mcp__notes"),
        output(6, [*text_output("seen:"), IMAGE], "custom_tool_call"),
    ],
    [
        {"type": "local_shell_call", "call_id": "call_7", "status": "completed",
         "action": {"type": "exec", "command": ["ls", "-a"], "timeout_ms": None}},
        output(7, '{"output": ".git"}'),
    ],
    [
        {"type": "local_shell_call", "id": "call_8", "call_id": None, "status": "completed",
         "action": {"type": "exec", "command": ["id"]}},
        {"type": "local_shell_call_output", "id": "call_8", "output": "me"},
    ],
    [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "python"}},
        message("assistant", "Found it."),
        message("user", "Go on."),
    ],
    [
        {"type": "tool_search_call", "call_id": "call_9", "status": "completed", "execution": "client",
         "arguments": {"query": "time"}},
        {"type": "tool_search_output", "call_id": "call_9", "status": "completed", "execution": "client",
         "tools": [function("clock")]},
    ],
    [
        *(call(10, "clock"), output(10, "12:00")),
        *(call(11, "clock") | {"arguments": '{"zone": "U'}, output(11, "no")),
    ],
    [{"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="}],
    [{"type": "ghost_snapshot", "ghost_commit": {"id": "c0ffee", "parent": None}}, message("user", "Next.")],
    [
        reasoning(content=[{"type": "reasoning_text", "text": "The user waits."}]),
        message("assistant", "So."),
        message("developer", "The user is away."),
        message("user", "Well?"),
    ],
    [{"type": "additional_tools", "role": "developer", "tools": [function("wait", seconds="number")]}],
    [{"type": "agent_message", "author": "/root", "recipient": "/root/b", "content": text_output("Hurry.")}],
    [{"type": "compaction", "encrypted_content": "gAAAAABofAnotherServer"}, message("user", "Again.")],
    [{"type": "context_compaction"}, {"type": "configuration_update", "reasoning": {"effort": "low"}}],
    [{"type": "of_next_year", "x": [1]}, message("assistant", "All is done."), message("user", "Thanks.")],
]  # fmt: skip


def requests() -> Iterator[Object]:
    """Yields the body of each turn."""
    history: list[Object] = []
    for added in ADDED:
        history += added
        yield {
            "model": MODEL,
            "instructions": "You are a coding agent.",
            "input": list(history),
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "a"},
        }
