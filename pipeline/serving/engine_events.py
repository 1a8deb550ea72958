"""The events that the engine's thread posts to the event loop; `EngineInbox` is the other direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.text_messages import TextMessages
from pipeline.text.grammar import MaskDropped, MaskRequest


@dataclass(frozen=True)
class ToClient:
    client: bytes
    message: object


@dataclass(frozen=True)
class ToOtherClients:
    excluded: bytes
    message: object


@dataclass(frozen=True)
class ToSupervisor:
    message: object


@dataclass(frozen=True)
class EngineReady:
    status: EngineStatus
    texts: TextMessages
    notes: tuple[str, ...]  # lines about the engine for a person


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot start, or cannot continue."""

    reason: str
    usage: bool  # the user's input is at fault


EngineEvent = (
    ToClient | ToOtherClients | ToSupervisor | MaskRequest | MaskDropped | EngineReady | EngineFailed
)
Post = Callable[[EngineEvent], None]
