"""The settings of a chat's requests, and the keys by which /set shows and changes them."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from launch.command_line.values import above, at_least, between, nearest
from launch.errors import WrongUsage
from pipeline.errors import RequestError
from pipeline.text.generation_defaults import validate
from protocol.messages import Sampling

RANDOM_ONLY = ("top_k", "top_p", "min_p", "seed")  # without effect on a greedy answer
NONE = "none"  # as a value of `stop` and `seed`


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of every request of a conversation; the fields are arguments of Client.generate."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def get(self, key: str) -> Any:
        """The value of one of KEYS."""
        return getattr(self if key in _OWN else self.sampling, key)

    def put(self, key: str, value: Any) -> AnswerSettings:
        """A copy in which one of KEYS has this value."""
        if key in _OWN:
            return replace(self, **{key: value})
        return replace(self, sampling=structs.replace(self.sampling, **{key: value}))

    def without_effect(self) -> list[str]:
        """A message that names the settings without effect at the present temperature, if any."""
        idle = [key for key in RANDOM_ONLY if self.get(key) != getattr(Sampling(), key)]
        if self.sampling.temperature > 0 or not idle:
            return []
        has = "has" if len(idle) == 1 else "have"
        return [f"{', '.join(idle)} {has} no effect at temperature 0; try /set temperature=0.8"]


_OWN = ("max_tokens", "stop", "ignore_eos")


def _seed(text: str) -> int | None:
    return None if text.lower() == NONE else at_least(0)(text)


def _switch(text: str) -> bool:
    words = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"must be on or off, not {text}")
    return words[text.lower()]


def _stop(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (at_least(1), "longest answer, in tokens"),
    "temperature": (between(0.0, math.inf), "0: greedy"),
    "top_k": (at_least(0), "only the K most probable tokens; 0: all"),
    "top_p": (above(0.0, 1.0), "only the most probable, P in all; 1: all"),
    "min_p": (between(0.0, 1.0), "only those P times as probable as the best"),
    "repetition_penalty": (above(0.0), "1: none"),
    "seed": (_seed, "of the sampling; none: new for each answer"),
    "stop": (_stop, "end before this text; stop=A stop=B for two"),
    "ignore_eos": (_switch, "on: continue after the end-of-text token"),
}


def change(settings: AnswerSettings, text: str, defaults: AnswerSettings) -> AnswerSettings:
    """The settings after `key=value ...`; an empty value restores the default. Raises WrongUsage."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise WrongUsage("a quotation mark is not closed; write \\' for a literal one") from None
    changed, stops = settings, list[str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS:
            raise WrongUsage(f"unknown setting {key[:40]!r}{nearest(key, KEYS)} ({', '.join(KEYS)})")
        if not equals:
            raise WrongUsage(f"{key}: write it as {key}=value")
        if key == "stop" and value and value.lower() != NONE:
            stops.append(_stop(value))
            changed = changed.put("stop", tuple(stops))
        elif not value:
            changed = changed.put(key, defaults.get(key))
        elif key == "stop":
            changed = changed.put("stop", ())
        else:
            changed = changed.put(key, _read(key, value))
    try:
        validate(changed.sampling)
    except RequestError as e:
        raise WrongUsage(str(e)) from e
    return changed


def echo(before: AnswerSettings, after: AnswerSettings, text: str) -> list[str]:
    """Returns the settings named in `text`, which `change` has accepted: each as /set takes it."""
    named = dict.fromkeys(word.partition("=")[0] for word in shlex.split(text))
    lines = []
    for key in named:
        each = [after.put(key, (stop,)) for stop in after.stop] if key == "stop" else []
        shown = " ".join(f"{key}={value_text(one, key)}" for one in each or [after])
        lines.append(shown + " (as before)" * (after.get(key) == before.get(key)))
    return lines


def _read(key: str, text: str) -> Any:
    try:
        return KEYS[key][0](text)
    except argparse.ArgumentTypeError as e:
        raise WrongUsage(f"{key}: {e}") from None


def value_text(settings: AnswerSettings, key: str) -> str:
    """The value in the spelling that /set accepts."""
    value = settings.get(key)
    if value is None or value == ():
        return NONE
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(shlex.quote(text.replace("\n", "\\n").replace("\t", "\\t")) for text in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
