"""What a request may hold, refused before it costs anything: a list far above the context is not even
decoded. Runs in the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.codec import decode, outline
from protocol.messages import TAGS, Calibrate, Done, Error, Generate, Score, SetPolicy, Tokenize

OUTLINED = 1 << 14  # bytes of a message whose lists are counted before it is decoded
ROLE_LIMIT = 256  # characters of a turn's role
GRAMMAR_LIMIT = 1 << 18  # characters
OPTIONS_LIMIT = 64  # options of a policy
OPTION_LIMIT = 1024  # characters of a policy's name, and of an option's name and value
EXCERPTS_LIMIT = 1 << 16  # of a calibration

_TAGS = {message: tag for tag, message in TAGS.items()}
_LISTS = {  # of token ids, or with a token for each entry at least
    _TAGS[Generate]: ("token_ids", "resume", "messages"),
    _TAGS[Score]: ("token_ids",),
}


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
        if sum(map(len, frames)) > OUTLINED:
            self._check_lists(frames)
        message = decode(frames)
        match message:
            case Generate() | Score() | Calibrate() | Tokenize():
                if reason := _too_much(message):
                    raise RequestRefused(Done(message.request, "error", reason, usage=True))
            case SetPolicy():
                if reason := _too_many_options(message):
                    raise RequestRefused(Error(message.request, reason))
        return message

    def _check_lists(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 2 or len(frames[0]) != 2:
            return
        found = outline(frames)
        for name in _LISTS.get(frames[0][0], ()):
            if (count := found.get(name, 0)) > self._context and "request" in found:
                reason = f"{name} has {count} tokens, the context is {self._context}; shorten it"
                if name == "messages":
                    reason = f"{count} turns do not fit the context of {self._context}"
                stats = {} if name == "resume" else {"prompt_tokens": count}
                raise RequestRefused(Done(found["request"], "error", reason, stats=stats, usage=True))


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
    if any(isinstance(value, list | dict) for value in message.options.values()):
        return "an option of a policy has a text or a number"
    if any(len(str(text)) > OPTION_LIMIT for pair in message.options.items() for text in pair):
        return f"an option of a policy has {OPTION_LIMIT} characters at most"
    if len(message.policy) > OPTION_LIMIT:
        return f"a policy's name has {OPTION_LIMIT} characters at most"
    return ""
