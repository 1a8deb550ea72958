"""The engine equals transformers: every preset, any plan, worker count, tile size, cache and path.

Each test starts one engine and takes it through the presets by SetPolicy. Every setting is scored as one
prefill (in several chunks) and stepwise through the decode path, alone and beside other requests.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import answered, check_policies, exactly, scored, within
from exact_presets import DIVIDING, costs, sample
from numpy.typing import NDArray
from oracle import Oracle
from rounding import Rounding
from transformers import AutoTokenizer

from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig

EXACT = 1e-4  # float32 log-probabilities against transformers'
LENGTH = 40  # tokens of each text
CHUNK = 32  # so that a prefill takes several chunks
NEW = 16  # tokens of a greedy continuation
TEXTS = 21  # compared with bfloat16
BF16_NOISE = 2**-9  # relative: half a unit in the last place, as much as bfloat16 itself rounds
BF16_SEEDS = 8
SEEDS = 3  # of the preset random, other ones with every engine


def sweep(number: int) -> list[tuple[str, dict[str, str]]]:
    """For one of several engines: half of the presets, so that two have all, and other draws for each."""
    seeds = range(number * SEEDS, (number + 1) * SEEDS)
    drawn = [{"seed": str(s), "churn": str(s % 2)} for s in seeds]
    others = list(DIVIDING.items())
    return [*sample(number, 2), *others, *[("random", d) for d in drawn]]


def tokenized(kind: str, count: int = LENGTH) -> tuple[int, ...]:
    """The first tokens of a kind's held-out text."""
    return _whole(kind)[:count]


@cache
def _whole(kind: str) -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    return tuple(tokenizer(heldout()[kind].read_text()[:8000])["input_ids"])


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    return [tokenized("python"), tokenized("german")]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(model_dir(), torch.float32)


@pytest.fixture(scope="module")
def greedy(texts, oracle) -> tuple[list[int], NDArray[np.float32]]:
    return oracle.greedy(texts[0], NEW)


def passages(count: int, length: int = LENGTH) -> list[tuple[int, ...]]:
    """Texts of `length` tokens, of every kind in turn; the first are the same for every count."""
    kinds = list(heldout())
    parts = -(-count // len(kinds))
    whole = {kind: tokenized(kind, parts * length) for kind in kinds}
    found = [whole[kind][i * length : (i + 1) * length] for i in range(parts) for kind in kinds]
    return found[:count]


SETTING_NAMES = ["1-worker", "2-workers", "3-workers", "all-cached"]
SETTINGS = [
    EngineConfig(workers=1, tile=None, expert_cache=0.25),
    EngineConfig(workers=2, tile=64, expert_cache=0.5),
    EngineConfig(workers=3, tile=176, expert_cache=0.0),
    EngineConfig(workers=2, tile=96, expert_cache=1.0),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "setting"), list(enumerate(SETTINGS)), ids=SETTING_NAMES)
async def test_every_preset_equals_transformers_in_float32(
    number, setting, texts, oracle, greedy, start_engine, tmp_path: Path
) -> None:
    plain = {"format": "f32", "backbone_dtype": "f32", "chunk": CHUNK, "costs": costs(tmp_path)}
    check = exactly(oracle.batch(texts), EXACT)
    async with start_engine(EngineConfig(**(vars(setting) | plain))) as (_, client):
        await check_policies(client, sweep(number), texts, check, texts[0], greedy, 2 * EXACT, alone=1)


@pytest.mark.timeout(300)
async def test_bf16_stays_within_what_transformers_bf16_differs_from_float32(
    texts, oracle, greedy, start_engine, tmp_path: Path
) -> None:
    """By the rule of rounding.py, from transformers' bfloat16 with noise of bfloat16's size. On an AMD EPYC
    with any of its instruction sets and kernels our mean over texts of 72 tokens is 0.0154 to 0.0169 nats and
    transformers' 0.0264 to 0.0277: rounding alone does not turn one into the other."""
    many = passages(TEXTS)
    exact = oracle.batch(many)
    rounded = Oracle(model_dir(), torch.bfloat16).noisy(many, BF16_NOISE, BF16_SEEDS)
    theirs = Rounding.of(rounded, exact, factor=1.0)
    config = EngineConfig(
        format="bf16",
        backbone_dtype="bf16",
        workers=2,
        tile=64,
        expert_cache=0.5,
        chunk=CHUNK,
        costs=costs(tmp_path),
    )
    async with start_engine(config) as (_, client):
        check = within(theirs, exact)
        await check_policies(client, sample(0, 4), many, check, texts[0], greedy, 2 * theirs.tail)


@pytest.mark.timeout(200)
async def test_a_fixed_plan_repeats_bit_for_bit(texts, start_engine, tmp_path: Path) -> None:
    """The same cuts give the same bits, whatever is resident and whichever worker is late: a second time in
    the same engine (with a warm cache), and in another with slower workers and a slower link."""
    rounds: list[list[NDArray[np.float32]]] = []
    policies = [
        ("all-host", {}),
        ("layerwise", {}),
        ("on-demand", {}),
        ("random", {"seed": "5"}),
        ("random", {"seed": "6", "churn": "1"}),
    ]
    for slowdown, link, times in ((1.0, None, 2), (1.5, 0.5, 1)):
        config = EngineConfig(
            format="bf16",
            workers=2,
            tile=64,
            expert_cache=0.3,
            chunk=CHUNK,
            host_slowdown=slowdown,
            link_gbps=link,
        )
        async with start_engine(config) as (_, client):
            for _ in range(times):
                results = []
                for policy, options in policies:
                    await client.set_policy(policy, options)
                    for stepwise in (False, True, False):
                        results.append(await scored(client, texts[1], stepwise))
                    np.testing.assert_array_equal(results[-1], results[-3])
                    results.append(np.array(await answered(client, texts[1], NEW)))
                rounds.append(results)
    for again in rounds[1:]:
        for first, second in zip(rounds[0], again, strict=True):
            np.testing.assert_array_equal(first, second)
