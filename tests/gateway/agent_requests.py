"""Requests as a coding agent sends them to /v1/messages: the whole conversation each time, with counters that
change, tools that only a provider runs, and blocks that are no texts."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

TURNS = 20
RULES = "Use the tools for work on files. Answer in a few words.\n" * 6 + "Be exact."
READ = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"name": "Read", "description": "Reads a file.", "input_schema": READ},
    {"name": "Task", "description": "Starts an agent.", "input_schema": {"type": "object"}, "strict": True},
    {"name": "Deploy", "description": "Deploys.", "input_schema": READ, "defer_loading": True},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "title": "Plan", "source": {"type": "base64", "media_type": "application/pdf"}}
NOTES = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The notes."}}
SEARCH = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "lists"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "http://a", "title": "A", "encrypted_content": "x"}],
    },
]
ADDED = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Deploy"}}


def counter(left: int) -> str:
    return f"<total_tokens>{left} tokens left</total_tokens>"


def cached(text: str) -> list[Body]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


def request(messages: list[Body], number: int, system: str = RULES) -> Body:
    """The body around a conversation; all that changes with its `number` changes."""
    header = (
        f"x-anthropic-billing-header: cc_version=2.1.100.7b{number}; cc_entrypoint=cli; cch=eb{number:03x};"
    )
    thinking = [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}]
    text = f"{system}\n\n{counter(200_000 - 371 * number)}\n"
    return {
        "model": "claude-small",
        "max_tokens": 4,
        "system": [{"type": "text", "text": header}, *cached("You are an agent."), *cached(text)],
        "messages": [message | {} for message in messages],
        "tools": TOOLS,
        "thinking": thinking[number % 3],
        "output_config": {"effort": "max"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
    }


def results(number: int) -> list[Body]:
    """What comes back from a tool: texts, images, references and what is said with it."""
    contents: list[Any] = [
        f"{number} lines",
        [{"type": "text", "text": "a picture"}, IMAGE],
        [{"type": "tool_reference", "tool_name": "Deploy"}],
        [NOTES, PDF],
    ]
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": contents[number % 4]}
    reminder = {"type": "text", "text": "<system-reminder>\nThe list is empty.\n</system-reminder>\n"}
    return [result, reminder] if number % 2 else [result]


def answer(number: int) -> list[Body]:
    """What the model has said: reasoning, a text, a search that the provider made, or a call."""
    thought = {"type": "thinking", "thinking": f"Thought {number}.", "signature": "c2ln"}
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"path": f"/{number}"}}
    made = SEARCH if number % 5 == 4 else [{"type": "redacted_thinking", "data": "x"}]
    return [thought, *made, {"type": "text", "text": f"Step {number}."}, call]


def conversation() -> list[list[Body]]:
    """The requests of 20 turns, in order; those of one list are sent at once. Each turn's messages are those
    of the turn before and more."""
    opening = [
        *cached("<system-reminder>\nIt is 2026-11-28.\n</system-reminder>\n"),
        *cached("Fix the list."),
    ]
    messages: list[Body] = [{"role": "user", "content": [*opening, IMAGE]}]
    sent = []
    for number in range(TURNS):
        sent.append([request(messages, number)])
        if number == 10:  # agents of its own, in parallel
            tasks = ([{"role": "user", "content": f"Task {task}."}] for task in range(3))
            sent.append([request(task, number, "You are a part of an agent. " + RULES) for task in tasks])
        messages.append({"role": "assistant", "content": answer(number)})
        messages.append({"role": "user", "content": results(number)})
        added = [ADDED] if number == 6 else []
        note = [{"type": "text", "text": counter(190_000 - number)}, *added]
        messages.append({"role": "system", "content": note})
        if number % 7 == 3:
            messages.append({"role": "user", "content": "Go on, please."})
    return sent
