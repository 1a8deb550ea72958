"""Sampling settings: their limits, and a model's recommended ones, from its generation_config.json or GGUF
file."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from pipeline.checkpoint.index import read_fields
from pipeline.errors import ModelError, RequestError
from pipeline.models.config_keys import MAX_FLOAT, MAX_INT, shown
from pipeline.models.shapes import is_gguf
from pipeline.text.gguf_text import GgufText
from protocol.messages import Sampling, Shaping

MOST_PENALTY = 100
MOST_BIAS = 1000
MOST_BIASES = 4096
MOST_LOGPROBS = 64
GRAMMAR_LIMIT = 1 << 18  # characters
MOST_RULES = 2000  # of a grammar, or references in its schemas: the library goes down in each
DRAWING = ("temperature", "top_k", "top_p", "min_p")  # apply only where the file sets do_sample


BOUNDS = {  # by setting: the least and the most, and how they are named
    "temperature": (0, sys.float_info.max, "0 or more (0 is greedy)"),
    "top_k": (0, math.inf, "0 or more (0 is no limit)"),
    "top_p": (math.ulp(0.0), 1, "above 0 and at most 1 (1 is no limit)"),
    "min_p": (0, 1, "from 0 to 1 (0 is no limit)"),
    "repetition_penalty": (0.01, 100, "from 0.01 to 100 (1 is none)"),
}


def validate(sampling: Sampling) -> None:
    """Raise RequestError, one line, where `sampling` cannot be served."""
    for name, (least, most, allowed) in BOUNDS.items():
        value = getattr(sampling, name)
        if not least <= value <= most:  # as of NaN
            raise RequestError(f"{name} is {value}; it must be {allowed}")
    if sampling.seed is not None and sampling.seed < 0:
        raise RequestError(f"seed is {sampling.seed}; it must be 0 or more")


def validate_shaping(shaping: Shaping, logprobs: int) -> None:
    """Raise RequestError where what changes the logits cannot be served; ids and grammar are not looked
    at."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(value := getattr(shaping, name)) <= MOST_PENALTY:
            raise RequestError(f"{name} is {value}; it must be from -{MOST_PENALTY} to {MOST_PENALTY}")
    if len(shaping.bias) > MOST_BIASES:
        raise RequestError(f"{len(shaping.bias)} biases are too many; at most {MOST_BIASES} are allowed")
    for bias in shaping.bias:
        if not abs(bias.bias) <= MOST_BIAS:
            raise RequestError(
                f"the bias of token {bias.token} is {bias.bias}; at most {MOST_BIAS} is allowed"
            )
    if not -1 <= logprobs <= MOST_LOGPROBS:
        raise RequestError(f"logprobs must be in 0..{MOST_LOGPROBS}, or -1 for none; it is {logprobs}")


def check_size(grammar: str) -> None:
    """Raise RequestError where a grammar, in llguidance's form, is too large to be looked at."""
    if len(grammar) > GRAMMAR_LIMIT:
        raise RequestError(f"a grammar has {GRAMMAR_LIMIT} characters at most")
    lines = r"\n" if grammar.lstrip().startswith("{") else "\n"  # of Lark, within JSON or without
    if max(grammar.count(lines), grammar.count("$ref")) > MOST_RULES:
        raise RequestError(f"a grammar has {MOST_RULES} rules or references at most")


def sampling_defaults(model_dir: Path) -> Sampling:
    """Returns a model's sampling settings, greedy where it has none. Raises ModelError where it is damaged or
    a value is invalid."""
    path = model_dir if is_gguf(model_dir) else model_dir / "generation_config.json"
    if is_gguf(path):
        config = GgufText(path).sampling()
    elif path.exists():
        config = read_fields(path)
    else:
        return Sampling()
    names = ("repetition_penalty", *(DRAWING if config.get("do_sample") else ()))
    given: dict[str, Any] = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in given.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        number = whole or (isinstance(value, float) and name != "top_k")
        if not number or not abs(value) < (MAX_INT if name == "top_k" else MAX_FLOAT):
            raise ModelError(f"{path}: {name} is {shown(value)}, which is not a valid number")
    if config.get("do_sample"):
        given.setdefault("temperature", 1.0)
    numbers: dict[str, Any] = {k: v if k == "top_k" else float(v) for k, v in given.items()}
    sampling = Sampling(**numbers)
    try:
        validate(sampling)
    except RequestError as e:
        raise ModelError(f"{path}: {e}") from None
    return sampling
