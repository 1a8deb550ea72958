"""Text for the screen: control characters made visible, parts joined to lines, hints in the chat's syntax."""

from __future__ import annotations

import re

SEPARATOR = " · "
# Text from a model or another program must not control the terminal: newline and tab only.
_ALLOWED = {ord("\n"): "\n", ord("\t"): "\t"}
_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))} | _ALLOWED
CALIBRATE = "python launch.py calibrate --text FILE"
_CALIBRATE = re.compile(re.escape(CALIBRATE) + r"(?: \(and --model, if given\))?")
_SET = re.compile(r"--set ([\w-]+)\.([\w-]+=[^\s)]+)((?: --set \1\.[\w-]+=[^\s)]+)*)")


def visible(text: str) -> str:
    """The text with U+FFFD for every control character but newline and tab."""
    return text.translate(_VISIBLE)


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
