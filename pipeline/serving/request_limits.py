"""Limits of what a request may hold, refused before it costs anything. Runs in the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.codec import decode
from protocol.messages import Calibrate, Done, Error, Generate, Score, SetPolicy, Tokenize

ROLE_LIMIT = 256  # characters of a turn's role
GRAMMAR_LIMIT = 1 << 18  # characters
OPTIONS_LIMIT = 64  # options of a policy
OPTION_LIMIT = 1024  # characters of a policy's name, and of an option's name and value
EXCERPTS_LIMIT = 1 << 16  # of a calibration


class RequestRefused(Exception):
    """A request that can never be served. `answer`: the message that says so."""

    def __init__(self, answer: Done | Error) -> None:
        super().__init__(answer)
        self.answer = answer


class RequestReader:
    """Decodes clients' messages for an engine with this context."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __call__(self, frames: Sequence[bytes]) -> object:
        """Raises RequestRefused, and MalformedMessage as `decode`."""
        message = decode(frames)
        if isinstance(message, Generate | Score):
            self._check_lists(message)
        match message:
            case Generate() | Score() | Calibrate() | Tokenize():
                if reason := _too_much(message):
                    raise RequestRefused(Done(message.request, "error", reason, usage=True))
            case SetPolicy():
                if reason := _too_many_options(message):
                    raise RequestRefused(Error(message.request, reason))
        return message

    def _check_lists(self, message: Generate | Score) -> None:
        """Raises RequestRefused for more tokens, or turns of a token at least, than the context has."""
        for name in ("token_ids", "resume", "messages"):
            count = len(getattr(message, name, None) or ())
            if count > self._context:
                reason = f"{name} has {count} tokens, the context is {self._context}; shorten it"
                if name == "messages":
                    reason = f"{count} turns do not fit the context of {self._context}"
                stats = {} if name == "resume" else {"prompt_tokens": count}
                raise RequestRefused(Done(message.request, "error", reason, stats=stats, usage=True))


def _too_much(message: Generate | Score | Calibrate | Tokenize) -> str:
    """Which text of a request is too long; "" where none is."""
    if isinstance(message, Calibrate):
        excerpts = len(message.starts)
        return f"starts has {excerpts} entries, at most {EXCERPTS_LIMIT} can be" * (excerpts > EXCERPTS_LIMIT)
    if isinstance(message, Score):
        return ""
    if isinstance(message, Generate) and len(message.shaping.grammar) > GRAMMAR_LIMIT:
        return f"a grammar has {GRAMMAR_LIMIT} characters at most"
    if any(len(turn.role) > ROLE_LIMIT for turn in message.messages or ()):
        return f"a turn's role has {ROLE_LIMIT} characters at most"
    return ""


def _too_many_options(message: SetPolicy) -> str:
    if len(message.options) > OPTIONS_LIMIT:
        return f"a policy has {OPTIONS_LIMIT} options at most"
    if any(len(text) > OPTION_LIMIT for pair in message.options.items() for text in pair):
        return f"an option of a policy has {OPTION_LIMIT} characters at most"
    if len(message.policy) > OPTION_LIMIT:
        return f"a policy's name has {OPTION_LIMIT} characters at most"
    return ""
