"""`launch.py generate`: one prompt, one answer, streamed to stdout or as one JSON object. After a Ctrl-C the
answer so far is shown, the JSON object has finish_reason "cancelled", the exit code is 1."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from launch.command_line.checks import MAX_TEXT_BYTES, check_reads_text, check_request
from launch.command_line.options import RANDOM_OPTIONS, Options
from launch.connect import reconnecting_client
from launch.errors import AnswerLost, WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts, Lines
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from pipeline.assets import model_dir
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import MAX_TOKENS, ChatMessage, Generate, Sampling, Token

log = logging.getLogger("tandem")


async def generate(options: Options, interrupts: Interrupts) -> int:
    """Complete a prompt. Raises WrongUsage, RequestFailed, AnswerLost, what `reconnecting_client` raises."""
    text = await _text(options)
    if text is not None and not options.connect:
        check_reads_text(options.config().model or model_dir(), chats="chat" in options.written)
    async with reconnecting_client(options, interrupts) as client:
        recommended = client.welcome.sampling if "chat" in options.written else Sampling()
        answer = client.generate(**_prompt(options, text, client), **answer_settings(options, recommended))
        answer.on_waiting = lambda why: notice(f"waiting for {why}" if why else "the engine goes on")
        tokens: list[Token] = []
        as_json = "json" in options.written
        try:
            async for token in answer:
                tokens.append(token)
                if not as_json:
                    show(_shown(token, len(tokens) == 1, client))
        except asyncio.CancelledError:
            if interrupts.received:
                _finish(options, answer, tokens, client)
            elif not as_json:  # the engine has exited, for which the supervisor prints a line
                show("\n")
            raise
        except RequestFailed as e:
            if tokens:
                raise AnswerLost(str(e)) from e
            raise
        _finish(options, answer, tokens, client)
        if answer.done is not None and answer.done.reason == "cancelled":  # by the engine
            raise AnswerLost("the engine cancelled this answer; it is shutting down")
    return 0


def answer_settings(options: Options, otherwise: Sampling) -> dict[str, Any]:
    """Returns the given arguments of Client.generate but the prompt; `otherwise`: for settings not given.
    Says which of the given ones have no effect."""
    settings = {
        key: options.written[key] for key in ("max_tokens", "stop", "ignore_eos") if key in options.written
    }
    sampling = options.sampling(otherwise)
    if sampling.temperature == 0 and RANDOM_OPTIONS & options.written.keys():
        log.warning("note: decoding is greedy without --temperature; the other sampling options are ignored")
    return settings | {"sampling": sampling}


async def _text(options: Options) -> str | None:
    """Returns the prompt as text, from the command line, a file or stdin, of which the last line's end is no
    part; None where token ids are given. Raises WrongUsage."""
    prompt: str | None = options.written.get("prompt")
    if prompt == "-":
        prompt = await _stdin()
        check_request(Path("stdin"), Generate(0, prompt=prompt))
    return prompt


async def _stdin() -> str:
    lines, read, size = Lines(sys.stdin.fileno()), list[str](), 0
    while size <= MAX_TEXT_BYTES and (line := await lines.next()) is not None:
        read.append(line)
        size += len(line) + 1  # with its end: empty lines have no other byte
    return "\n".join(read)


def _prompt(options: Options, text: str | None, client: Client) -> dict[str, Any]:
    if text is None:
        ids = options.written["prompt_tokens"]
        largest = client.welcome.vocabulary - 1
        if max(ids) > largest:
            raise WrongUsage(f"--prompt-tokens: {max(ids)} is no token; this model's ids end at {largest}")
        return {"token_ids": ids}
    if not client.welcome.has_tokenizer:
        raise WrongUsage("this model has no tokenizer, so it reads no text; give --prompt-tokens")
    if "chat" not in options.written:
        return {"prompt": text}
    if not client.welcome.has_chat_template:
        raise WrongUsage("--chat: this model has no chat template; leave it out")
    system = [ChatMessage("system", options.written["system"])] if "system" in options.written else []
    return {"messages": (*system, ChatMessage("user", text))}


def _shown(token: Token, first: bool, client: Client) -> str:
    """Returns the text of a token; from a model without tokenizer its id, as --prompt-tokens takes them."""
    return token.text if client.welcome.has_tokenizer else f"{'' if first else ','}{token.token}"


def _finish(options: Options, answer: Answer, tokens: list[Token], client: Client) -> None:
    last, reason = ("", "cancelled") if answer.done is None else (answer.done.text, answer.done.reason)
    stats = {} if answer.done is None else answer.done.stats
    if "json" not in options.written:
        show(last + "\n")
        most = options.written.get("max_tokens", MAX_TOKENS)
        length = "; --max-tokens reached" if len(tokens) == most else "; the context is full"
        end = {"cancelled": "; cancelled", "length": length}
        print(f"[tandem] {_speed(len(tokens), stats)}{end.get(reason, '')}", file=sys.stderr)
        return
    if client.welcome.emulation:
        stats = stats | {"emulation": client.welcome.emulation}
    print_json(
        {
            "token_ids": [token.token for token in tokens],
            "text": "".join(token.text for token in tokens) + last,
            "finish_reason": reason,
            "prefill_tok_s": stats.get("prefill_tok_s"),
            "decode_tok_s": stats.get("decode_tok_s"),
            "policy": stats.get("policy", client.welcome.policy),
            "fidelity": stats.get("fidelity"),
            "stats": stats,
        }
    )


def _speed(tokens: int, stats: dict[str, Any]) -> str:
    """Returns the speed of an answer of `tokens` tokens and of its prompt."""
    words = count(tokens, "token")
    if stats.get("decode_tok_s"):
        words += f", {stats['decode_tok_s']:.1f} tok/s"
    if stats.get("prefill_tok_s"):
        words += f"; prompt of {stats.get('prompt_tokens', 0)}, {stats['prefill_tok_s']:.0f} tok/s"
    return words + ("" if stats.get("fidelity", {}).get("exact", True) else "; approximate (shares: --json)")
