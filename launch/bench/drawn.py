"""Routing for `bench --replay shape:NAME`, which no engine has recorded: of a model whose locality was
published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.errors import WrongUsage
from launch.forecast import Sizes, sizes_of
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig, FormatName
from pipeline.models.shapes import PREFIX, SHAPES
from pipeline.traces.synthetic import PROFILES, DrawnTrace, SyntheticText

FORMAT: FormatName = "int4"
HISTORY = 4000  # tokens of other texts, from which it is known which experts are popular
TEXTS, PROMPT, TOKENS = 3, 128, 64  # one after the other, each with a prompt
KNOWN = ", ".join(PREFIX + name for name in PROFILES if name in SHAPES)


def drawn_trace(shape: Path, seed: int) -> tuple[DrawnTrace, Sizes]:
    """Returns routing of a model of this shape, and what its parts weigh. Raises WrongUsage, ModelError."""
    name = str(shape).removeprefix(PREFIX).partition("/")[0]
    if name not in PROFILES:
        raise WrongUsage(f"--replay {shape}: no locality of its routing is known (known: {KNOWN})")
    sizes = sizes_of(open_model(shape), EngineConfig(model=shape), FORMAT)
    header = replace(sizes.header, model=name)
    text = SyntheticText(header, PROFILES[name], seed)
    counts = text.counts(HISTORY)
    steps = [step for _ in range(TEXTS) for step in text.steps(PROMPT, PROMPT, TOKENS)]
    return DrawnTrace(shape, header, steps, counts), sizes
