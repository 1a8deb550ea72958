"""lm-evaluation-harness against a gateway. It brings many packages, so it is an extra of its own, `clients`,
which `make test` installs where it can; without it this test skips itself."""

from __future__ import annotations

import asyncio

import pytest
from gateway_engine import Served

from pipeline.assets import heldout, model_dir
from protocol.client import Client


def texts() -> list[tuple[str, str]]:
    """Beginnings and continuations, of the held-out texts."""
    found = []
    for path in list(heldout().values())[:4]:
        text = path.read_text()
        found += [(text[start : start + 160], text[start + 160 : start + 200]) for start in (0, 400)]
    return found


def test_log_likelihoods_of_the_harness_are_those_of_score(served: Served) -> None:
    pytest.importorskip("lm_eval", reason="of the extra `clients`")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    harness = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="tandem-embedded",
        tokenizer_backend="huggingface",
        tokenizer=str(model_dir()),
        batch_size=4,
        max_length=1024,
    )
    pairs = texts()
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    given = harness.loglikelihood(asked)

    async def score(begin: str, rest: str) -> tuple[float, bool]:
        async with Client.connect(served.endpoint) as own:
            context, continuation = harness._encode_pair(begin, rest)
            ids = [*context, *continuation]
            blocks = [block async for block in own.score(token_ids=ids, top=1)]
            chosen = [float(value) for block in blocks for value in block.chosen]
            best = [int(row[0]) for block in blocks for row in block.top_tokens]
            first = len(context) - 1
            greedy = best[first : len(ids) - 1] == ids[first + 1 :]
            return sum(chosen[first:]), greedy

    for (begin, rest), (likelihood, greedy) in zip(pairs, given, strict=True):
        wanted, wanted_greedy = asyncio.run(score(begin, rest))
        assert likelihood == pytest.approx(wanted, abs=1e-4)
        assert greedy == wanted_greedy
