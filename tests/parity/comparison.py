"""Takes a running engine through policies, and compares its log-probabilities and greedy answers with known
ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from equality import near_tie_or_equal
from numpy.typing import NDArray
from rounding import Distances, Rounding, Rows

from protocol.client import Client

ALONE = 7  # texts that an engine scores while it has nothing else to do

Tokens = tuple[int, ...]
Check = Callable[[Sequence[Rows]], str]  # an engine's log-probabilities -> what is wrong; "" if nothing is


async def check_policies(
    client: Client,
    policies: Sequence[tuple[str, dict[str, str]]],
    texts: Sequence[Tokens],
    check: Check,
    prompt: Tokens,
    greedy: tuple[list[int], NDArray[np.float32]],
    bound: float,
    alone: int = ALONE,
) -> None:
    """Under each policy `check` finds nothing wrong with the texts' log-probabilities, as one prefill and
    stepwise, and the answer to `prompt` equals `greedy` (tokens and the log-probabilities that they were
    chosen from) up to near-ties of `bound` nats. The first `alone` texts are scored one after the other, so
    that steps are of one token, the others at once, and stepwise beside the answer."""
    reference, chosen_from = greedy
    wrong: list[str] = []
    for policy, options in policies:
        await client.set_policy(policy, options)
        for stepwise in (False, True):
            ours = [await scored(client, tokens, stepwise) for tokens in texts[:alone]]
            others = asyncio.gather(*(scored(client, tokens, stepwise) for tokens in texts[alone:]))
            if stepwise:
                tokens = await answered(client, prompt, len(reference))
                if not near_tie_or_equal(tokens, reference, chosen_from, bound):
                    wrong.append(f"{policy} {options} generate: {tokens} instead of {reference}")
            if error := check(ours + await others):
                wrong.append(f"{policy} {options} {stepwise=}: {error}")
    assert not wrong, "\n".join(wrong)


def exactly(expected: Sequence[Rows], bound: float) -> Check:
    """Every log-probability of each text differs by less than `bound`."""

    def check(found: Sequence[Rows]) -> str:
        errors = [float(np.abs(ours - rows).max()) for ours, rows in zip(found, expected, strict=True)]
        return ", ".join(f"{error:.2e}" for error in errors if not error < bound)

    return check


def within(allowed: Rounding, exact: Sequence[Rows]) -> Check:
    """The distances to exact log-probabilities are rounding as in `allowed` (rounding.py): those of the first
    ALONE texts, and those of the others."""
    return lambda ours: allowed.refusal(Distances.between(ours, exact), ALONE)


async def scored(client: Client, tokens: Tokens, stepwise: bool) -> Rows:
    """[len(tokens), vocabulary]; stepwise: the second half of them one at a time."""
    prefill = len(tokens) // 2 if stepwise else 1
    blocks = client.score(token_ids=tokens, full=True, stepwise=stepwise, prefill=prefill)
    return np.concatenate([block.logprobs async for block in blocks])


async def answered(client: Client, prompt: Tokens, count: int) -> list[int]:
    """The greedy answer's `count` tokens."""
    return [t.token async for t in client.generate(token_ids=prompt, max_tokens=count, ignore_eos=True)]
