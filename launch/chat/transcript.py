"""Conversations as files: JSON, mode 0600, written whole or not at all.

    {"model": "...", "system": null or "...", "messages": [{"role": "user", "content": "..."}, ...]}

Questions and answers alternate, from the first question to the last answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.command_line.checks import read_file
from launch.command_line.values import nearest
from launch.errors import OutputFailed, WrongUsage
from protocol.messages import ChatMessage
from shm.atomic_file import atomic_file

LARGEST = 16 << 20  # bytes of a file that is read; a conversation fits a model's context
FIELDS = ("model", "system", "messages")
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Transcript:
    model: str
    system: str | None
    messages: tuple[ChatMessage, ...]


def save(transcript: Transcript, path: Path) -> None:
    """Write the file, mode 0600, or replace it. Raises OutputFailed; an existing file is then unchanged."""
    messages = [{"role": message.role, "content": message.content} for message in transcript.messages]
    value = {"model": transcript.model, "system": transcript.system, "messages": messages}
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    try:
        if path.is_dir():
            raise OutputFailed(f"{path} is a directory")
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as e:
        raise OutputFailed(f"cannot write {path}: {e.strerror}") from e


def load(path: Path) -> Transcript:
    """Raises WrongUsage, one line, for a file of another format."""
    try:
        value = json.loads(read_file(path, LARGEST))
    except (ValueError, RecursionError) as e:
        raise WrongUsage(f"{path} is not JSON: {' '.join(str(e).split())}") from e
    if not isinstance(value, dict) or "messages" not in value:
        raise WrongUsage(f"{path} is not a saved conversation: it has no object with `messages`")
    for name in value:
        if name not in FIELDS:
            raise WrongUsage(f"{path}: unknown field {name[:40]!r}{nearest(name, FIELDS)}")
    model, system = value.get("model", ""), value.get("system")
    if not _is_text(model):
        raise WrongUsage(f"{path}: `model` must be a string")
    if system is not None and not (_is_text(system) and system):
        raise WrongUsage(f"{path}: `system` must be a non-empty string, or null")
    return Transcript(model, system, _messages(path, value["messages"]))


def _messages(path: Path, value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list):
        raise WrongUsage(f"{path}: `messages` must be a list")
    messages = []
    for i, item in enumerate(value):
        good = isinstance(item, dict) and item.keys() == {"role", "content"}
        if not good or not _is_text(item["role"]) or not _is_text(item["content"]):
            raise WrongUsage(f"{path}: message {i + 1} must have the strings `role` and `content` alone")
        if item["role"] != ROLES[i % 2]:
            raise WrongUsage(
                f"{path}: message {i + 1} must be the {ROLES[i % 2]}'s, not {item['role'][:40]!r}: "
                "questions and answers alternate"
            )
        messages.append(ChatMessage(item["role"], item["content"]))
    if len(messages) % 2:
        raise WrongUsage(f"{path}: the last question has no answer")
    return tuple(messages)


def _is_text(value: object) -> bool:
    """Whether it is a string that can be sent: JSON's escapes can write half a surrogate pair."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value
