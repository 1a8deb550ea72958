"""An answer in the terminal, written as its tokens arrive, and the dim summary line below it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from rich.text import Text

from launch.chat.conversation import Reply
from launch.chat.screen import Screen, visible
from launch.chat.word_wrap import WordWrap
from launch.phase_profile import PhaseProfile
from launch.terminal.format import percent
from launch.terminal.interrupts import Interrupts
from shm.segment import byte_size

STATUS_DELAY = 0.7  # seconds without a token until "reading the prompt" is shown
SEPARATOR = " · "
ERASE_LINE = "\r\x1b[2K"


class AnswerView:
    """Writes one answer within a `with` block; implements conversation.View."""

    def __init__(self, screen: Screen, interrupts: Interrupts) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._stack = ExitStack()
        self._status_shown = False  # the cursor's line is a status, which the next output erases
        self._at_line_start = True
        self._wrap = WordWrap(lambda: screen.width)
        self._empty = True
        self._status_timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> AnswerView:
        self._stack.enter_context(self._screen.deferring())
        self._status_timer = asyncio.get_running_loop().call_later(
            STATUS_DELAY, self._show_status, "reading the prompt ..."
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.ended()
        self._stack.close()

    def queued(self, position: int) -> None:
        if self._empty:
            self._clear_status()
            self._show_status(f"queued, position {position}")

    def append(self, text: str) -> None:
        if text:
            self._clear_status()
            self._write(self._wrap.push(visible(text)))
            self._at_line_start = text.endswith("\n")
            self._empty = False

    def notice(self, text: str) -> None:
        self.ended()
        self._wrap = WordWrap(lambda: self._screen.width)
        self._screen.note(text)

    def cancelling(self) -> None:
        # The session must not end by an accidental second Ctrl-C; a third one ends it.
        self._stack.enter_context(self._interrupts.handled_by(lambda: None))

    def ended(self) -> None:
        self._clear_status()
        if not self._at_line_start:
            self._at_line_start = True
            self._write("\n")

    def _show_status(self, text: str) -> None:
        self._status_shown = True
        with self._screen.console.capture() as capture:
            self._screen.console.print(Text(text[: self._screen.width - 1], style="dim"), end="")
        self._write(ERASE_LINE + capture.get())

    def _clear_status(self) -> None:
        if self._status_timer is not None:
            self._status_timer.cancel()
            self._status_timer = None
        if self._status_shown:
            self._status_shown = False
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def summary(reply: Reply, emulation: str, max_tokens: int) -> list[str]:
    """The parts of the summary line below an answer."""
    stats = reply.done.stats
    parts = [f"{reply.tokens} token{'' if reply.tokens == 1 else 's'}"]
    if stats.get("decode_tok_s"):
        parts.append(f"{stats['decode_tok_s']:.1f} tok/s")
    if reply.first_s is not None:
        parts.append(f"first {reply.first_s:.2f} s")
    if "kv_reused_tokens" in stats:
        parts.append(f"KV {stats['kv_reused_tokens']}/{stats.get('prompt_tokens', 0)}")
    phases = [phase for phase in stats.get("engine", {}).values() if isinstance(phase, dict)]
    if tiles := sum(PhaseProfile(phase, 0).tiles for phase in phases):
        parts.append(f"host {percent(sum(phase['host_tiles'] for phase in phases) / tiles)}")
        parts.append(f"{byte_size(sum(phase['fetched_bytes'] for phase in phases))} moved")
    if times := stats.get("preemptions"):
        parts.append(f"preempted {times} time{'' if times == 1 else 's'}")
    if reply.done.reason == "length":
        parts.append("cut at max_tokens" if reply.tokens >= max_tokens else "cut at the context's end")
    elif reply.done.reason == "cancelled":
        parts.append("cancelled")
    if emulation:
        parts.append(f"emulated: {emulation}")
    return parts


def in_lines(parts: list[str], width: int) -> str:
    """The parts, joined by dots; lines longer than `width` are broken between parts."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{SEPARATOR}{part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)
