"""The prompts and texts of `bench`, tokenized by an engine that has a token for each byte."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch.bench.measure import (
    LEAST,
    OTHER_TOKENS,
    SCORED,
    Texts,
    make_prompts,
    read_other_texts,
)
from launch.errors import WrongUsage
from pipeline.assets import heldout
from pipeline.policies.placements import ENOUGH_TOKENS

FILES = [path.read_bytes() for path in heldout().values()]


class ByteEngine:
    """Row i of a text gives the next token log-probability -0.01 i."""

    def __init__(self, context: int = 300, tokenizer: bool = True) -> None:
        self.welcome = SimpleNamespace(context=context, has_tokenizer=tokenizer, vocabulary=50)
        self.read: list[list[int]] = []
        self.asked: list[dict[str, Any]] = []

    async def score(self, text: str = "", token_ids: Sequence[int] = (), **how: Any) -> AsyncIterator[Any]:
        ids = list(token_ids) or [*text.encode()]
        assert len(ids) <= self.welcome.context
        self.read.append(ids)
        self.asked.append(how)
        chosen = -0.01 * np.arange(len(ids) - 1, dtype=np.float32)
        for start in range(0, len(ids), 50):
            tokens = np.array(ids[start : start + 50], np.int32)
            yield SimpleNamespace(start=start, tokens=tokens, chosen=chosen[start : start + 50])


async def test_without_a_tokenizer_there_are_random_ids_from_the_seed() -> None:
    engine = ByteEngine(tokenizer=False)
    first = await make_prompts(engine, 3, 100, seed=5)  # type: ignore[arg-type]
    assert first == await make_prompts(engine, 3, 100, seed=5)  # type: ignore[arg-type]
    assert len({*first}) == 3
    assert {token for prompt in first for token in prompt} <= {*range(50)}
    texts = await make_prompts(engine, 3, 100, 5, SCORED)  # type: ignore[arg-type]
    await read_other_texts(engine, seed=5)  # type: ignore[arg-type]
    other = [tuple(ids) for ids in engine.read]
    assert sum(map(len, other)) >= ENOUGH_TOKENS
    assert {len(ids) for ids in other} == {OTHER_TOKENS}
    assert len({ids[:100] for ids in (*first, *texts, *other)}) == 6 + len(other)  # nothing is read twice


@pytest.mark.parametrize(
    ("tokens", "prefill", "fits"), [(256, 20, 20), (70, 20, 20), (10, 400, 289), (33, 1, 1)]
)
async def test_perplexity_is_that_of_the_asked_number_of_tokens(tokens: int, prefill: int, fits: int) -> None:
    engine = ByteEngine()
    texts = await Texts.make(engine, tokens, prefill, seed=0)  # type: ignore[arg-type]
    assert (texts.tokens, texts.prefill) == (tokens, fits)
    count = min(len(FILES), max(1, tokens // LEAST))
    assert len(texts.ids) == count
    assert max(len(ids) for ids in texts.ids) == fits + 1 - (-tokens // count)
    engine.asked.clear()
    nll = sum(0.01 * row for ids in texts.ids for row in range(fits, len(ids) - 1))
    assert await texts.perplexity(engine) == pytest.approx(math.exp(nll / tokens))  # type: ignore[arg-type]
    assert engine.asked == [{"stepwise": True, "prefill": fits}] * count


async def test_texts_longer_than_the_context_are_refused() -> None:
    for context, refused in ((12, False), (11, True)):
        engine = ByteEngine(context)
        if refused:
            with pytest.raises(WrongUsage, match="--ppl-tokens 10"):
                await Texts.make(engine, 10, 5, seed=0)  # type: ignore[arg-type]
        else:
            assert (await Texts.make(engine, 10, 5, seed=0)).prefill == 1  # type: ignore[arg-type]
