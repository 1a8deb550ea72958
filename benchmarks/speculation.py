"""What exact speculation gives: tokens a second with guesses of next tokens, against none and against fixed
numbers of them, on texts that repeat and on texts that do not.

    python -m benchmarks.speculation [--model DIR] [--format F] [--tokens N] [--texts T] [--settings off,on]

One engine for each setting, all at once; only one of them computes at a time. Each round gives every prompt
to every engine in turns, and begins with another engine, so that a machine whose speed drifts favours none.
Answers are greedy, but those `drawn`, which are sampled; `schema` is JSON within a schema, `call` that of a
tool, as the gateway asks for them. Ratios are of each round's own pair: by the clock, with
their least and most, and of tokens a second of processor time, which other programs disturb less; with
`taskset -c 0` and --workers 0 nothing spins in it.

    python -m benchmarks.speculation --simulated

Held-out text of every kind, 500 tokens each behind 200, as if a model said it, without a model: steps take a
given share more for each guess. Prints tokens a second relative to none guessed, mean and least.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from itertools import takewhile
from statistics import mean, median
from typing import Any

import psutil
from tokenizers import Tokenizer

from launch.command_line.values import guesses, model_path
from launch.equality import Verdict, compare
from launch.processes.supervisor import Supervisor
from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig
from pipeline.gateway.settings import Tools, json_schema
from pipeline.scheduling.drafts import Draft
from pipeline.scheduling.speculation import MOST, StepCosts, best_numbers
from protocol.client import Client
from protocol.messages import Sampling, Shaping, Token

CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
NAMES = "apple, bread, cheese, dates, eggs, flour, grapes, honey, juice, kale, lemon, milk, nuts, oats, peas"
RECORDS = "\n".join(
    f'{{"id": {n}, "name": "item {n}", "price": {n * 7 % 10}.50, "in_stock": true, "tags": ["new", "sale"]}},'
    for n in range(1, 9)
)
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "maximum": 999},
        "name": {"type": "string", "maxLength": 12},
        "price": {"type": "number", "multipleOf": 0.5, "maximum": 99},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["new", "sale", "rare"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["id", "name", "price", "in_stock", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 4, "maxItems": 12}
CALL = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 20},
        "first_line": {"type": "integer", "maximum": 999},
        "last_line": {"type": "integer", "maximum": 999},
        "case_sensitive": {"type": "boolean"},
        "output_mode": {"enum": ["content", "files_with_matches", "count"]},
        "replacements": {"type": "array", "items": RECORD, "minItems": 1, "maxItems": 2},
    },
    "required": ["path", "first_line", "last_line", "case_sensitive", "output_mode", "replacements"],
    "additionalProperties": False,
}
DRAWN = Sampling(temperature=1.0, seed=1)


def prompts(text: bool) -> dict[str, tuple[dict[str, Any], Sampling]]:
    """Returns what to go on with, and how, by name. Without `text` the weights are random: greedy answers
    then repeat themselves, and drawn ones do not."""
    if not text:
        ids = {"token_ids": tuple(range(3, 67))}
        return {"greedy": (ids, Sampling()), "drawn": (ids, DRAWN)}
    every: dict[str, tuple[dict[str, Any], Sampling]] = {
        name: ({"prompt": given}, sampling) for name, (given, sampling) in texts().items()
    }
    schema, asked = Shaping(grammar=json_schema(SCHEMA, "").text), f"As JSON:\n[\n{RECORDS[:180]}\n]\nAgain: "
    call = Shaping(grammar=Tools(schemas={"edit": CALL}, wanted=("edit",), calls="json").grammar().text)
    for name, sampling in (("", Sampling()), (" drawn", DRAWN)):
        every[f"schema{name}"] = dict(prompt=asked, shaping=schema), sampling
        every[f"call{name}"] = dict(prompt="Edit the file with the tool. ", shaping=call), sampling
    return every


def texts() -> dict[str, tuple[str, Sampling]]:
    """Returns prompts for a model with a tokenizer."""
    greedy = Sampling()
    kinds = heldout()
    plain = kinds[min(kinds)].read_text()[:400]
    return {
        "code edit": (f"{CODE}\n\n# The same class again:\n\n{CODE[:120]}", greedy),
        "list copied": (f"List: {NAMES}.\nList: {NAMES}.\nList: {NAMES[:20]}", greedy),
        "records": (f"[\n{RECORDS}\n", greedy),
        "prose": (plain, greedy),
        "drawn": (plain, DRAWN),
    }


class Setting:
    """One engine."""

    def __init__(self, name: str, client: Client, supervisor: Supervisor) -> None:
        self.name, self._client, self._supervisor = name, client, supervisor
        self.has_tokenizer = client.welcome.has_tokenizer

    async def answer(self, asked: dict[str, Any]) -> tuple[list[Token], dict[str, float]]:
        """Returns an answer and its figures. Prompts are those of the rounds before, so that little of it is
        prefill."""
        before = self._processor_seconds()
        answer = self._client.generate(ignore_eos="shaping" not in asked, **asked)
        tokens = [token async for token in answer]
        assert answer.done is not None
        stats, used = answer.done.stats, self._processor_seconds() - before
        made, accepted = stats["decode_tokens"], stats["accepted_tokens"]
        figures = {"speed": stats["decode_tok_s"], "work": used / made, "a step": made / (made - accepted)}
        return tokens, figures | {"guessed": stats["guessed_tokens"]}

    def _processor_seconds(self) -> float:
        """Returns what the engine's processes have used."""
        times = [psutil.Process(pid).cpu_times() for pid in self._supervisor.pids.values()]
        return float(sum(each.user + each.system for each in times))

    async def stats(self) -> dict[str, Any]:
        """Returns the engine's figures of its guesses."""
        stats: dict[str, Any] = (await self._client.stats())["speculation"]
        return stats


def simulated(ids: list[int], prompt: int, added: float, wish: str | int) -> float:
    """Returns the tokens a second of a text behind its prompt, relative to those without guesses. `added`:
    what a guess adds to a step."""
    tokens, costs, seconds = ids[:prompt], StepCosts(), 0.0
    draft = Draft(tokens)
    while len(tokens) < len(ids):
        draft.follow()
        following = ids[len(tokens) :]
        most = min(MOST, len(following) - 1)
        guessed, chances = draft.tokens(most), draft.chances(most)
        number = min(len(guessed), wish) if isinstance(wish, int) else 0
        if wish == "on" and chances and not costs.stale(1):
            number = best_numbers([chances], costs, most)[0]
        step = 1 + added * number
        costs.note(1, number, step)
        seconds += step
        right = [*takewhile(bool, map(operator.eq, guessed[:number], following))]
        tokens += following[: 1 + len(right)]
    return (len(ids) - prompt) / seconds


def simulate() -> None:
    """Print a line for each share that a guess adds."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    every = [tokenizer.encode(path.read_text()[:25_000]).ids for path in heldout().values()]
    parts = [ids[start : start + 700] for ids in every for start in range(0, len(ids) - 700, 700)]
    for added in (0.15, 0.3, 0.6, 0.8):
        for wish in ("on", 1, 2, 4):
            speeds = [simulated(ids, 200, added, wish) for ids in parts]
            print(f"+{added:.0%} a guess, {wish}: {mean(speeds):.3f}, least {min(speeds):.3f}")


Figures = dict[tuple[str, str], list[dict[str, float]]]  # of each round, by text and setting


async def started(options: argparse.Namespace, stack: AsyncExitStack) -> list[Setting]:
    """Returns an engine for each setting; they run until the stack ends."""
    settings = []
    for name in options.settings.split(","):
        config = EngineConfig(
            model=options.model,
            format=options.format,
            backbone_dtype=options.backbone_dtype,
            name=f"spec-{name}",
            workers=options.workers,
            chunk=256,
            context=1024,
            speculate=guesses(name),
        )
        supervisor = await stack.enter_async_context(Supervisor(config, log_level="WARNING"))
        client = await stack.enter_async_context(Client.connect(supervisor.endpoint, name="benchmark"))
        settings.append(Setting(name, client, supervisor))
    return settings


async def one_round(settings: list[Setting], options: argparse.Namespace) -> Figures:
    """Give every prompt to every engine in turns."""
    figures: Figures = {}
    every = prompts(settings[0].has_tokenizer)
    for text in options.texts.split(",") if options.texts else every:
        prompt, sampling = every[text]
        expected: list[Token] = []
        for setting in settings:
            found, own = await setting.answer(prompt | {"max_tokens": options.tokens, "sampling": sampling})
            expected = expected or found
            if compare([t.token for t in found], expected, 1.0).verdict is Verdict.MISMATCH:
                print(f"{text}: {setting.name} has other tokens than {settings[0].name}")
            figures[text, setting.name] = [own]
    return figures


def table(every: Figures, names: list[str]) -> None:
    """Print each text's line of each setting."""
    for text in dict.fromkeys(text for text, _ in every):
        base = every[text, names[0]]
        print(f"{text}: {median(one['speed'] for one in base):.1f} tok/s {names[0]}")
        for name in names[1:]:
            own = every[text, name]
            pairs = list(zip(own, base, strict=True))
            ratios = sorted(one["speed"] / other["speed"] for one, other in pairs)
            work = median(other["work"] / one["work"] for one, other in pairs)
            kinds = "speed", "a step", "guessed"
            speed, made, guessed = (median(one[kind] for one in own) for kind in kinds)
            print(
                f"  {name:>4} {speed:7.1f} tok/s, ratio {median(ratios):.2f}"
                f" ({ratios[0]:.2f}-{ratios[-1]:.2f}), by processor time {work:.2f};"
                f" {made:.2f} tokens a step, {guessed:.0f} guessed"
            )


async def measure(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        settings = await started(options, stack)
        await one_round(settings, options)  # warms up
        every: Figures = defaultdict(list)
        until = time.monotonic() + 60 * options.minutes
        for number in range(options.rounds):
            at = number % len(settings)
            for key, one in (await one_round(settings[at:] + settings[:at], options)).items():
                every[key] += one
            if time.monotonic() > until:
                print(f"{number + 1} rounds")
                break
        table(every, [setting.name for setting in settings])
        for setting in settings:
            print(setting.name, await setting.stats())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_path)
    parser.add_argument("--format")
    parser.add_argument("--backbone-dtype")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--texts", help="some of them, with commas")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no further round begins")
    parser.add_argument("--settings", default="off,on,1,2,4")
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.simulated:
        simulate()
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
