"""What the engine's thread posts to the event loop: messages to deliver, and the engine's own start and
failure.

The other direction is `EngineInbox`. Nothing else crosses between the two threads but `EngineStatus`, which
any thread may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.serving.engine_status import EngineStatus


@dataclass(frozen=True)
class ToClient:
    """A message for one client."""

    client: bytes
    message: object


@dataclass(frozen=True)
class ToOtherClients:
    """A message for every client but one."""

    excluded: bytes
    message: object


@dataclass(frozen=True)
class ToSupervisor:
    """A message for the supervisor."""

    message: object


@dataclass(frozen=True)
class EngineReady:
    """The engine is built and takes requests. `notes`: lines about it for a person."""

    status: EngineStatus
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot start, or cannot continue. `usage`: the user's input is at fault."""

    reason: str
    usage: bool


EngineEvent = ToClient | ToOtherClients | ToSupervisor | EngineReady | EngineFailed
Post = Callable[[EngineEvent], None]
