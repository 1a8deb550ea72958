"""A conversation in the form that a model's chat template reads: families disagree on names of fields, and on
what may be in one message. Whether earlier reasoning is kept is the template's own choice."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.text.chat_format import TemplateKind

Turn = dict[str, Any]

# Joins a call's arguments to its own text, and asks nowhere whether they are one: DeepSeek's.
JOINS = re.compile(r"\barguments['\"]?\]?\s*(?:[+~]|-?\}\})")
ASKS = re.compile(r"\barguments['\"]?\]? is (?:not )?(?:string|mapping)")


# What a model is told whose template has no place for tools, in words that no family owns; CallForm "json".
TOOLS = """\
You may call tools. A call is written so, and nothing else behind it; its result comes with the next message:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
The tools are these, with the JSON schemas of their arguments:
"""
RESULT = "<tool_response>\n{}\n</tool_response>"


def as_template_reads(turns: list[Turn], template: str, tools: Sequence[Turn] = ()) -> list[Turn]:
    """Returns the turns, each with a role, a content and what else it has, for a template of this text.
    `tools`: that may be called, of which a template without a place for them reads nothing."""
    kind = TemplateKind.of_text(template)
    if not kind.tools:
        return _as_texts(turns, tools)
    harmony = kind.calls == "harmony"
    as_text = JOINS.search(template) is not None and ASKS.search(template) is None
    found = [_adapted(turn, harmony, as_text) for turn in turns]
    return _one_call_each(found) if harmony else found


def _adapted(turn: Turn, harmony: bool, as_text: bool) -> Turn:
    if reasoning := turn.get("reasoning_content"):
        turn = turn | {"reasoning": reasoning}  # the library adds other names
    if not turn.get("tool_calls"):
        return turn
    if harmony and reasoning and turn["content"]:  # it takes one of them, as the thoughts before the call
        turn = turn | {"thinking": f"{reasoning}\n{turn['content']}", "content": ""}
    if as_text:
        turn = turn | {"tool_calls": [_with_text(call) for call in turn["tool_calls"]]}
    return turn


def _with_text(call: Turn) -> Turn:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def _as_texts(turns: list[Turn], tools: Sequence[Turn]) -> list[Turn]:
    """Returns the turns with the tools in the system message, calls in the text of their answers, and the
    results of one answer as one message of the user's: nothing that a plain template does not know."""
    found: list[Turn] = []
    for role, group in itertools.groupby(turns, lambda turn: turn["role"]):
        if role == "tool":
            found.append({"role": "user", "content": "\n".join(RESULT.format(t["content"]) for t in group)})
            continue
        for turn in group:
            calls = [_call_text(call) for call in turn.get("tool_calls") or ()]
            text = "\n".join([turn["content"], *calls] if turn["content"] else calls) or turn["content"]
            found.append({key: turn[key] for key in turn if key != "tool_calls"} | {"content": text})
    if tools:
        shown = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
        system = TOOLS + "\n".join(shown)
        if found and found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{system}"
        else:
            found.insert(0, {"role": "system", "content": system})
    return found


def _call_text(call: Turn) -> str:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _one_call_each(turns: list[Turn]) -> list[Turn]:
    """Returns the turns with one call in each, and its result behind it: Harmony has one recipient a
    message."""
    found, place = [], 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        if len(calls := turn.get("tool_calls") or ()) < 2:
            found.append(turn)
            continue
        results = list(itertools.takewhile(lambda later: later["role"] == "tool", turns[place:]))
        place += len(results)
        for call in calls:
            found.append(turn | {"tool_calls": [call]})
            turn = {"role": turn["role"], "content": ""}
            own = next((r for r in results if r.get("tool_call_id") == call.get("id")), None)
            if own is not None:
                results.remove(own)
                found.append(own)
        found += results
    return found
