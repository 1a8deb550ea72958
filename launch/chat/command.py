"""`launch.py` without a command, and `launch.py chat`: a conversation. On a terminal the REPL runs
(`repl.py`). Where stdin or stdout is a pipe or a file, or TERM names a dumb terminal, each line of stdin is a
question or a command (`plain.py`)."""

from __future__ import annotations

import logging
import os
import sys

from launch.chat.conversation import Conversation
from launch.chat.plain import line_by_line
from launch.chat.settings import AnswerSettings
from launch.command_line.checks import check_can_chat
from launch.command_line.options import Options
from launch.connect.reconnect import reconnecting_client
from launch.generate import answer_settings
from launch.terminal.interrupts import Interrupts
from pipeline.assets import model_dir
from protocol.client import Client

log = logging.getLogger("tandem")

LONGEST_ANSWER = 512  # tokens, without --max-tokens; at most half the context
DUMB_TERMINALS = ("", "dumb", "unknown")


async def chat(options: Options, interrupts: Interrupts) -> int:
    """0 at the end of the input, 1 where a piped question or command failed. Raises WrongUsage for a model
    that cannot chat, before anything is loaded, and as `reconnecting_client`."""
    if not options.connect:
        check_can_chat(options.config().model or model_dir())
    async with reconnecting_client(options, interrupts) as client:
        settings = _settings(options, client)
        conversation = Conversation(client, settings, options.written.get("system"))
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
            from launch.chat.repl import Repl  # not for a pipe: the terminal libraries take time to import

            return await Repl(client, conversation, interrupts).run()
        return await line_by_line(client, conversation, interrupts)


def _settings(options: Options, client: Client) -> AnswerSettings:
    most = {"max_tokens": min(LONGEST_ANSWER, max(1, client.welcome.context // 2))}
    asked = answer_settings(options, client.welcome.sampling)
    return AnswerSettings(**most | asked | {"stop": tuple(asked.get("stop", ()))})
