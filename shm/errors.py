"""Errors of the shared-memory package, each with when it is raised."""


class ShmError(Exception):
    """Base of this package's errors; its text is one line for a person."""


class UnknownFormat(ShmError):
    """A format name that no class implements."""


class WeightsUnusable(ShmError):
    """Weights to quantize are infinite, not a number, or beyond what the formats can hold."""


class NotEnoughMemory(ShmError):
    """The space check before an allocation failed; the text says how much is needed and what to change."""


class SegmentMissing(ShmError):
    """A segment to attach does not exist."""


class SegmentEmpty(ShmError):
    """A segment to attach has no bytes: whoever made it died before it had any."""


class StoreInvalid(ShmError):
    """A segment or cache file is not a store of this version, is unfinished, or is another model's."""


class StoreDamaged(ShmError):
    """A checksum asked for does not match."""
