"""`launch.py` without a command, and `launch.py chat`: a conversation. On a terminal the REPL runs
(`repl.py`). Where stdin or stdout is a pipe or a file, or TERM names a dumb terminal, each line of stdin is a
question or a command: stdout then holds the answers alone, and messages and tables go to stderr."""

from __future__ import annotations

import os
import sys

from msgspec import structs

from launch.chat.conversation import Conversation, Settings
from launch.chat.session import Output, Session
from launch.command_line.checks import check_reads_text
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import OutputFailed, WrongUsage
from launch.generate import answer_settings
from launch.terminal.interrupts import Interrupts, Lines
from launch.terminal.log import complain
from launch.terminal.progress import DUMB_TERMINALS
from pipeline.assets import model_dir
from protocol.client import Client
from protocol.errors import RequestFailed

LONGEST_ANSWER = 512  # tokens, without --max-tokens; at most half the context


async def chat(options: Options, interrupts: Interrupts) -> int:
    """Returns 0 at the end of the input, 1 where a piped question or command failed. Raises WrongUsage for a
    model that cannot chat, before anything is loaded, and as `reconnecting_client`."""
    if not options.connect:
        check_reads_text(options.config().model or model_dir(), chats=True)
    async with reconnecting_client(options, interrupts) as client:
        settings, system = _settings(options, client), options.written.get("system")
        conversation = Conversation(client, settings, interrupts, system)
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
            from launch.chat.repl import Repl  # not for a pipe: the terminal libraries take time to import

            return await Repl(client, conversation, interrupts).run()
        return await line_by_line(client, conversation, interrupts)


def _settings(options: Options, client: Client) -> Settings:
    asked = answer_settings(options, client.welcome.sampling)
    most = min(LONGEST_ANSWER, max(1, client.welcome.context // 2))
    defaults = {"max_tokens": most, "ignore_eos": False} | structs.asdict(asked.pop("sampling"))
    return defaults | asked | {"stop": tuple(asked.get("stop", ()))}


async def line_by_line(client: Client, conversation: Conversation, interrupts: Interrupts) -> int:
    """Returns 0 at the end of the input, 1 where a question or command failed; those after it are done all
    the same. Raises EngineGone; AnswerLost where it shuts down during an answer."""
    session = Session(client, conversation, interrupts, Output())
    lines = Lines(sys.stdin.fileno())
    failed = ended = False
    while not ended:
        line = await lines.next()
        try:
            ended = line is None or not await session.handle(line)
        except (WrongUsage, OutputFailed, RequestFailed) as e:
            complain(e)
            failed = True
    return 1 if failed else 0
