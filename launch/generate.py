"""`launch.py generate`: one prompt, one answer, streamed to stdout or as one JSON object. After a Ctrl-C the
answer so far is shown, the JSON object has finish_reason "cancelled", the exit code is 1."""

from __future__ import annotations

import asyncio
from typing import Any

from launch.command_line.options import Options
from launch.connect.reconnect import reconnecting_client
from launch.errors import AnswerLost, WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import ChatMessage, Sampling, Token


async def generate(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, RequestFailed, AnswerLost and what `reconnecting_client` raises."""
    async with reconnecting_client(options, interrupts) as client:
        answer = client.generate(**_prompt(options, client), **answer_settings(options, Sampling()))
        tokens: list[Token] = []
        as_json = "json" in options.written
        try:
            async for token in answer:
                tokens.append(token)
                if not as_json:
                    show(token.text)
        except asyncio.CancelledError:
            if interrupts.received:
                _finish(answer, tokens, client, as_json)
            elif not as_json:  # the engine has exited, for which the supervisor prints a line
                show("\n")
            raise
        except RequestFailed as e:
            if tokens:
                raise AnswerLost(str(e)) from e
            raise
        _finish(answer, tokens, client, as_json)
        if answer.done is not None and answer.done.reason == "cancelled":  # by the engine
            raise AnswerLost("the engine cancelled this answer; it is shutting down")
    return 0


def answer_settings(options: Options, otherwise: Sampling) -> dict[str, Any]:
    """The given arguments of Client.generate but the prompt; `otherwise`: for settings not given."""
    settings = {
        key: options.written[key] for key in ("max_tokens", "stop", "ignore_eos") if key in options.written
    }
    return settings | {"sampling": options.sampling(otherwise)}


def _prompt(options: Options, client: Client) -> dict[str, Any]:
    ids = options.written.get("prompt_tokens")
    if ids is not None:
        largest = client.welcome.vocabulary - 1
        if max(ids) > largest:
            raise WrongUsage(f"--prompt-tokens: {max(ids)} is no token; this model's ids end at {largest}")
        return {"token_ids": ids}
    if not client.welcome.has_tokenizer:
        raise WrongUsage("--prompt: this model has no tokenizer; give --prompt-tokens")
    if "chat" not in options.written:
        return {"prompt": options.written["prompt"]}
    if not client.welcome.has_chat_template:
        raise WrongUsage("--chat: this model has no chat template; leave it out")
    return {"messages": (ChatMessage("user", options.written["prompt"]),)}


def _finish(answer: Answer, tokens: list[Token], client: Client, as_json: bool) -> None:
    last, reason = ("", "cancelled") if answer.done is None else (answer.done.text, answer.done.reason)
    stats = {} if answer.done is None else answer.done.stats
    if not as_json:
        show(last + "\n")
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
