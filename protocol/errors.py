"""Errors of the protocol package, each with when it is raised."""


class ProtocolError(Exception):
    """Base of this package's errors; its text is one line for a person."""


class MalformedMessage(ProtocolError):
    """Frames that are not a message of this version: wrong tag, types, sizes, counts or limits."""


class NotPrivate(ProtocolError):
    """A file or directory is not this user's, or other users can read or write it."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class EngineGone(ProtocolError):
    """The engine cannot be reached, or has been silent for longer than heartbeats allow."""


class ConnectionLost(EngineGone):
    """This connection is lost or could not be opened, and a new one may work: the engine is silent, was
    restarted, or has dropped this client."""


class RequestFailed(ProtocolError):
    """The engine answered with an error, whose text this is. `usage`: the request is at fault."""

    def __init__(self, text: str, usage: bool = False) -> None:
        super().__init__(text)
        self.usage = usage
