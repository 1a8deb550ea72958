"""An answer in the terminal, as it comes, and the dim line after it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rich.text import Text

from launch.chat.conversation import Reply
from launch.chat.screen import Screen, visible
from launch.chat.word_wrap import WordWrap
from launch.terminal.interrupts import Interrupts

PATIENCE = 0.7  # seconds without a token, after which a person is told that the prompt is being read
SEPARATOR = " · "
ERASE_LINE = "\r\x1b[2K"


class AnswerView:
    """The view of one answer, for the length of a `with` block; see conversation.View."""

    def __init__(self, screen: Screen, interrupts: Interrupts) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._stack = ExitStack()
        self._passing = False  # a line that is erased when something else comes
        self._at_start = True  # of a line
        self._wrap = WordWrap(lambda: screen.width)
        self._empty = True
        self._patience: asyncio.TimerHandle | None = None

    def __enter__(self) -> AnswerView:
        self._stack.enter_context(self._screen.holding())
        self._patience = asyncio.get_running_loop().call_later(
            PATIENCE, self._say_in_passing, "reading the prompt ..."
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()
        self._new_line()
        self._stack.close()

    def waiting(self, position: int) -> None:
        if self._empty:
            self._settle()
            self._say_in_passing(f"waiting for room, position {position}")

    def piece(self, text: str) -> None:
        if text:
            self._settle()
            self._write(self._wrap.push(visible(text)))
            self._at_start = text.endswith("\n")
            self._empty = False

    def forgot(self, turns: int, why: str) -> None:
        self._settle()
        self._new_line()
        which = "oldest turn was" if turns == 1 else f"{turns} oldest turns were"
        self._screen.note(f"the {which} dropped: {why}")

    def aside(self, text: str) -> None:
        """A dim line now; the answer goes on below it."""
        self._settle()
        self._new_line()
        self._wrap = WordWrap(lambda: self._screen.width)
        self._screen.note(text)

    def cancelling(self) -> None:
        # A second Ctrl-C that follows by mistake must not end the session; a third one does.
        self._stack.enter_context(self._interrupts.handled_by(lambda: None))

    def ended(self) -> None:
        self._settle()
        self._new_line()

    def _say_in_passing(self, text: str) -> None:
        self._passing = True
        with self._screen.console.capture() as capture:
            self._screen.console.print(Text(text[: self._screen.width - 1], style="dim"), end="")
        self._write(ERASE_LINE + capture.get())

    def _settle(self) -> None:
        """Erase what was said in passing, and say no more of it."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._passing:
            self._passing = False
            self._write(ERASE_LINE)

    def _new_line(self) -> None:
        if not self._at_start:
            self._at_start = True
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def summary(reply: Reply, emulation: str, max_tokens: int) -> list[str]:
    """What there is to say of an answer, in a few words each."""
    stats = reply.done.stats
    parts = [f"{reply.tokens} token{'' if reply.tokens == 1 else 's'}"]
    if stats.get("decode_tok_s"):
        parts.append(f"{stats['decode_tok_s']:.1f} tok/s")
    if reply.first_s is not None:
        parts.append(f"first {reply.first_s:.2f} s")
    if "kv_reused_tokens" in stats:
        parts.append(f"KV {stats['kv_reused_tokens']}/{stats.get('prompt_tokens', 0)}")
    phases = [phase for phase in stats.get("engine", {}).values() if isinstance(phase, dict)]
    if sum(total(phase) for phase in phases):
        host = sum(phase["host_tiles"] for phase in phases)
        parts.append(f"host {share(host, sum(total(phase) for phase in phases))}")
        parts.append(f"{in_bytes(sum(phase['fetched_bytes'] for phase in phases))} moved")
    if stats.get("preemptions"):
        parts.append(f"set aside {stats['preemptions']} times for want of room")
    if reply.done.reason == "length":
        parts.append("cut at max_tokens" if reply.tokens >= max_tokens else "cut at the context's end")
    elif reply.done.reason == "cancelled":
        parts.append("cancelled")
    if emulation:
        parts.append(f"emulated: {emulation}")
    return parts


def in_lines(parts: list[str], width: int) -> str:
    """The parts with dots between them; a line that would be longer than `width` ends before a part."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{SEPARATOR}{part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def total(phase: dict[str, Any]) -> int:
    """Tiles that a phase of the engine computed, wherever."""
    return int(phase["host_tiles"] + phase["resident_tiles"] + phase["fetched_tiles"])


def share(part: float, whole: float) -> str:
    """A percentage that says 0 or 100 only where it is."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "<1 %"
    if 99 < percent < 100:
        return ">99 %"
    return f"{percent:.0f} %"


def in_bytes(count: float) -> str:
    """Bytes with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.2g} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
