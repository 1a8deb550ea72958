"""`launch.py evaluate`: the share of multiple-choice items that the model answers right, under each policy.

A model answers with the choice whose tokens have the greatest log-probability after the context. A tokenizer
may join the context's end and a choice's beginning in one token, so an item's choices are compared from the
first token on that they and the context do not all share. The context but for its last token is prefilled,
and the rest is computed one token at a time: approximations act while decoding.

Items are JSON objects, one a line; blank lines are skipped:

    {"context": "The capital of France is", "choices": [" Paris", " Rome", " Bonn"], "answer": 0}

context   text before the choice
choices   two or more continuations of it, all different; a choice begins with the space before its word
answer    the index of the right one, from 0
kind      a group for the report; optional
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import fsum, isnan, sqrt
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from rich.console import RenderableType

from launch.bench.command import check_own, session
from launch.bench.measure import warm_up
from launch.bench.plan import requested_policies
from launch.command_line.checks import WrongLine, check_reads_text, parse_line, read_lines
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.terminal.format import count, model_name, percent
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import Column, Table, each, policy_name, print_parts
from pipeline.assets import items as embedded_items
from pipeline.assets import model_dir
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.codec import encode
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import Score

AT_ONCE = 8  # items whose choices are scored at the same time
WARM_UP_NEW = 8  # tokens generated under a new policy before its first item

Text = Annotated[str, Meta(min_length=1)]


class Item(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One question. `line`: its number in the file."""

    context: Text
    choices: Annotated[tuple[Text, ...], Meta(min_length=2)]
    answer: Annotated[int, Meta(ge=0)]
    kind: str = ""
    line: int = 0


def read_items(path: Path) -> list[Item]:
    """Returns a file's items. Raises WrongUsage, one line with the file and the line's number, for invalid
    items."""
    return read_lines(path, _item, "item")


def _item(line: str, number: int) -> Item:
    """Returns the item of a line. Raises WrongLine with the reason."""
    item = parse_line(line, Item)
    if len(set(item.choices)) < len(item.choices):
        raise WrongLine("choices must be different texts")
    if item.answer >= len(item.choices):
        raise WrongLine(f"answer must be an index of the choices, 0 to {len(item.choices) - 1}")
    try:
        for text in (item.kind, *(item.context + choice for choice in item.choices)):
            encode(Score(0, text=text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return msgspec.structs.replace(item, line=number)


@dataclass(frozen=True)
class Answers:
    """The index of the choice that a policy's model gave each item."""

    policy: PolicyRequest
    exact: bool
    chosen: Sequence[int]


def accuracy(items: Sequence[Item], answers: Answers, kind: str | None = None) -> dict[str, float]:
    """Returns the share of items of this kind, or of all, that were answered right, with its error."""
    wanted = [i for i, item in enumerate(items) if kind is None or item.kind == kind]
    number = len(wanted)
    share = sum(answers.chosen[i] == items[i].answer for i in wanted) / number
    return {
        "items": number,
        "accuracy": share,
        "standard_error": sqrt(share * (1 - share) / number),
    }


async def evaluate(options: Options, interrupts: Interrupts) -> int:
    """Run `evaluate`. Raises WrongUsage, RequestFailed, PolicyError, Disturbed and what `session` raises."""
    if not options.connect:
        check_reads_text(options.config().model or model_dir(), ids="")
    path: Path = options.written.get("items") or embedded_items()
    items = read_items(path)[: options.written.get("limit")]
    policies = requested_policies(options, options.config().seed) if "policy" in options.written else []
    async with session(options, interrupts, restore=bool(policies)) as (client, changes):
        if not client.welcome.has_tokenizer:
            raise WrongUsage("evaluate: this model has no tokenizer, and items are text")
        present = PolicyRequest(client.welcome.policy)
        results = []
        with ProgressCounter("evaluate: items", len(items) * max(1, len(policies))) as bar:
            for request in policies or [present]:
                exact = client.welcome.exact
                if policies:
                    exact = (await client.set_policy(request.name, request.options, counted=False)).exact
                    await _warm_up(client, path, items[0])
                bar.start_stage(f"evaluate: {request.label}")
                results.append(await _answers(client, path, items, request, exact, bar))
                check_own(changes)
        model = client.welcome.model
    if "json" in options.written:
        print_json(_to_json(model, path, items, results), digits=7)
    else:
        print_parts(*_report(model, path, items, results))
    return 0


async def _warm_up(client: Client, path: Path, item: Item) -> None:
    """Fill the expert cache of a policy that was just set."""
    with _named(path, item):
        await warm_up(client, [tuple(await _tokens(client, item.context))], WARM_UP_NEW)


@contextmanager
def _named(path: Path, item: Item) -> Iterator[None]:
    """Says of which item a request failed."""
    try:
        yield
    except RequestFailed as e:
        raise RequestFailed(f"{path}, line {item.line}: {e}", usage=e.usage) from e


async def _tokens(client: Client, text: str) -> list[int]:
    tokens: list[int] = []
    async for block in client.score(text=text):
        tokens += block.tokens.tolist()
    return tokens


async def _answers(
    client: Client,
    path: Path,
    items: Sequence[Item],
    policy: PolicyRequest,
    exact: bool,
    bar: ProgressCounter,
) -> Answers:
    free = asyncio.Semaphore(AT_ONCE)

    async def answer(item: Item) -> int:
        async with free:
            with _named(path, item):
                scores = await _scores(client, item)
        bar.count()
        return scores.index(max(scores))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(item)) for item in items]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # all have the same cause
    return Answers(policy, exact, [task.result() for task in tasks])


async def _scores(client: Client, item: Item) -> list[float]:
    """The log-probability of each choice after the context. Raises RequestFailed."""
    context = await _tokens(client, item.context)
    read = max(1, len(context) - 1)  # rows that predict the context

    async def score(choice: str) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        chosen: list[float] = []
        async for block in client.score(text=item.context + choice, stepwise=True, prefill=read):
            tokens += block.tokens.tolist()
            chosen += block.chosen.tolist()
        return tokens, chosen

    scored = await asyncio.gather(*map(score, item.choices))
    every = zip(context, *(tokens for tokens, _ in scored), strict=False)
    shared = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, every))
    if not shared or any(len(tokens) == shared for tokens, _ in scored):
        raise RequestFailed(
            "its choices do not begin with a token of their own after the context", usage=True
        )
    scores = [fsum(chosen[shared - 1 :]) for _, chosen in scored]  # a row predicts the next token
    if any(map(isnan, scores)):
        raise RequestFailed("the model's logits are not finite")
    return scores


def _kinds(items: Sequence[Item]) -> list[str]:
    return list(dict.fromkeys(item.kind for item in items if item.kind))


def _to_json(model: str, path: Path, items: Sequence[Item], results: Sequence[Answers]) -> dict[str, Any]:
    first = results[0]
    return {
        "model": model,
        "items": str(path),
        "policies": [
            {
                "name": answers.policy.name,
                "options": answers.policy.options,
                "exact": answers.exact,
                **accuracy(items, answers),
                "changed": _changed(first, answers),
                "answers": list(answers.chosen),
                "kinds": {kind: accuracy(items, answers, kind) for kind in _kinds(items)},
            }
            for answers in results
        ],
    }


def _changed(first: Answers, answers: Answers) -> int:
    """Counts the items that the first policy's model answers differently."""
    return sum(a != b for a, b in zip(first.chosen, answers.chosen, strict=True))


def _report(
    model: str, path: Path, items: Sequence[Item], results: Sequence[Answers]
) -> Iterator[RenderableType]:
    several = len(results) > 1

    def of(figure: str) -> Callable[[Answers], float]:
        return lambda answers: accuracy(items, answers)[figure]

    def by_kind(answers: Answers) -> Column[str]:
        return Column(
            answers.policy.label, lambda kind: accuracy(items, answers, kind)["accuracy"], each(percent)
        )

    shares = each(lambda share: percent(share, 1))
    columns = [
        Column[Answers]("policy", lambda answers: policy_name(answers.policy, answers.exact), text=True),
        Column[Answers]("right", of("accuracy"), shares),
        Column[Answers]("+-", of("standard_error"), shares),
        Column[Answers](
            "changed", lambda answers: _changed(results[0], answers) if several else None, optional=True
        ),
    ]
    yield from (Table(columns, results), "")
    if kinds := _kinds(items):
        title = Column[str]("right, by kind", str, text=True)
        yield from (Table([title, *map(by_kind, results)], kinds), "")
    chance = sum(1 / len(item.choices) for item in items) / len(items)
    yield f"{model_name(model)}, {count(len(items), 'item')} of {path.name}; by chance {percent(chance)}"
    yield "+-: the standard error"
    if several:
        yield f"changed: items that {results[0].policy.label} answers differently"
