"""Text for the screen: parts joined to lines, hints in the chat's syntax."""

from __future__ import annotations

import re

from protocol.program import COMMAND

SEPARATOR = " · "
CALIBRATE = f"{COMMAND} calibrate --text FILE"
_CALIBRATE = re.compile(re.escape(CALIBRATE) + r"(?: \(and --model, if given\))?")
_SET = re.compile(r"--set ([\w-]+)\.([\w-]+=[^\s)]+)((?: --set \1\.[\w-]+=[^\s)]+)*)")


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


def in_chat_syntax(text: str, engine: str) -> str:
    """An engine's message with the command line's --set POLICY.OPTION=VALUE as the chat's /policy, and a
    calibration as a command for another terminal. `engine`: its name or address for --connect."""

    def as_command(found: re.Match[str]) -> str:
        more = found[3].replace(f" --set {found[1]}.", " ")
        return f"/policy {found[1]} {found[2]}{more}"

    elsewhere = f"{CALIBRATE} --connect {engine} in another terminal"
    return _SET.sub(as_command, _CALIBRATE.sub(lambda found: elsewhere, text))
