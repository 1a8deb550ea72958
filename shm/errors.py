"""Errors of the shared-memory package, each with when it is raised."""

from __future__ import annotations

from protocol.program import COMMAND


class ShmError(Exception):
    """Base of this package's errors; its text is one line for a person."""


class UnknownFormat(ShmError):
    """No class implements a format of this name."""


class NotCompiled(ShmError):
    """A C library is missing, or is that of another version."""

    def __init__(self, name: str) -> None:
        """`name`: of the library."""
        super().__init__(f"the C library {name} is not compiled for this version: see {COMMAND} doctor")


class WeightsUnusable(ShmError):
    """Weights to quantize are infinite, not a number, or beyond what the formats can hold."""


class NotEnoughMemory(ShmError):
    """The space check before an allocation failed; the text names the bytes needed and what to change."""


class NotEnoughDisk(ShmError):
    """The file of a partial store cannot be written; the text names it and the reason."""


class SegmentMissing(ShmError):
    """A segment to attach does not exist."""


class SegmentEmpty(ShmError):
    """A segment to attach has no bytes: its creator exited before allocating any."""


class StoreInvalid(ShmError):
    """A segment or cache file is not a store of this version, is unfinished, or is another model's."""


class StoreDamaged(ShmError):
    """A checksum does not match."""
