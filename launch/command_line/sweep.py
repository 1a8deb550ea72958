"""The grammar of `bench --sweep NAME=V1,V2,...`: the settings of a run, or an option of the policies."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.command_line.values import at_least, between
from launch.errors import WrongUsage

# Name: its option, and what reads a value. Those of the engine come first: each value starts another engine.
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "costs": ("costs", Path),
    "cache": ("expert_cache", between(0.0, 1.0)),
    "batch": ("batch", at_least(1)),
    "prompt": ("prompt_len", at_least(1)),
    "gen": ("gen_len", at_least(2)),
}
OF_REPLAY = ("costs", "cache")  # settings that a trace leaves open


@dataclass(frozen=True)
class Axis:
    """One --sweep. `name`: in SETTINGS, or a policy's option as `option` or `policy.option`."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_setting(self) -> bool:
        return self.name in SETTINGS


def axes(written: dict[str, Any]) -> list[Axis]:
    """Settings first, in the order of SETTINGS. Raises WrongUsage."""
    given = [_axis(text) for text in written.get("sweep", ())]
    names = [axis.name for axis in given]
    for axis in given:
        if names.count(axis.name) > 1:
            raise WrongUsage(f"--sweep {axis.name} is given twice; write all of its values in one list")
        if axis.is_setting:
            _check_setting(axis, written)
    order = list(SETTINGS)
    settings = sorted((axis for axis in given if axis.is_setting), key=lambda axis: order.index(axis.name))
    return settings + [axis for axis in given if not axis.is_setting]


def _axis(text: str) -> Axis:
    name, equals, listed = text.partition("=")
    words = [word.strip() for word in listed.split(",")]
    if not (name and equals and all(words)):
        raise WrongUsage(f"--sweep {text}: write it as NAME=V1,V2, such as batch=1,4,16 or dali.window=2,8")
    options = {option.replace("_", "-"): short for short, (option, _) in SETTINGS.items()}
    name = options.get(name.replace("_", "-"), name)
    known = name in SETTINGS or "." in name
    if not known and (near := difflib.get_close_matches(name, [*SETTINGS, *options], 1)):
        raise WrongUsage(f"--sweep {text}: unknown {name!r}; did you mean {near[0]!r}?")
    try:
        read = SETTINGS[name][1] if name in SETTINGS else str
        axis = Axis(name, tuple(map(read, words)))
    except argparse.ArgumentTypeError as e:
        raise WrongUsage(f"--sweep {text}: {e}") from None
    if len(set(axis.values)) < len(words):
        raise WrongUsage(f"--sweep {text}: a value comes twice")
    return axis


def _check_setting(axis: Axis, written: dict[str, Any]) -> None:
    name, option = axis.name, SETTINGS[axis.name][0]
    spelled = "--" + option.replace("_", "-")
    if option in written:
        raise WrongUsage(f"--sweep {name}: {spelled} is given as well; give one of them")
    if "replay" in written and name not in OF_REPLAY:
        raise WrongUsage(
            f"--sweep {name}: a trace has the batch, prompts and answers that were recorded; record one for"
            " each value (bench --record), or sweep cache, costs or a policy's option"
        )
    if name == "costs" and "replay" not in written:
        raise WrongUsage("--sweep costs: an engine has its own costs; they can vary with --replay")
    if name == "cache" and "connect" in written:
        raise WrongUsage("--sweep cache: another size needs another engine; leave out --connect")
    if "record" in written and len(axis.values) > 1:
        raise WrongUsage(f"--sweep {name}: a recording is of one setting; leave out --record")
