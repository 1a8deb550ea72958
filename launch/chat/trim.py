"""Which turns a conversation keeps when its prompt leaves too little of the context for an answer. Lengths
are estimates: the engine's count for the whole prompt, divided by characters."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import ChatMessage

MARKUP = 12  # characters that count for what the chat template writes around a message


def answer_room(context: int, max_tokens: int) -> int:
    """Tokens of the context that a prompt with earlier turns leaves for the answer: `max_tokens`, but at
    least a quarter of the context."""
    return max(1, context // 4, min(max_tokens, context))


def trimmed(
    turns: Sequence[ChatMessage], system: str | None, *, tokens: int, context: int, room: int
) -> tuple[list[ChatMessage], int]:
    """The newest of `turns` and the room for their answer, for a prompt of `tokens` tokens that left less
    than `room`. `turns`: questions and answers in pairs, and then the new question, which is always kept.

    Earlier turns may fill what system message, question and room leave of the context. So many are dropped
    at once that the others fill half of it (the last pair may fill all): the following prompts then only
    grow, and their KV is reused. Where nothing is left for earlier turns, the room is reduced to a quarter of
    the context. At least one pair is dropped, unless a reduced room suffices."""
    sizes = [MARKUP + len(turn.content) for turn in turns]
    whole = sum(sizes) + (0 if system is None else MARKUP + len(system))
    scale = tokens / whole  # tokens for each character
    history = scale * sum(sizes[:-1])
    free = context - room - (tokens - history)
    if free <= 0 and room > (least := max(1, context // 4)):
        free, room = free + room - least, least
        if history <= free:
            return list(turns), room
    question = len(turns) - 1
    first = question
    while first > 2:
        larger = scale * sum(sizes[first - 2 : question])
        if larger > (free if first == question else free / 2):
            break
        first -= 2
    return list(turns[first:]), room
