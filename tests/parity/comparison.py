"""Takes a running engine through policies, and compares its log-probabilities and greedy answers with known
ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from equality import near_tie_or_equal
from numpy.typing import NDArray
from rounding import Distances, Rounding, Rows

from protocol.client import Client

ALONE = 7  # texts that an engine scores while it has nothing else to do

Tokens = tuple[int, ...]
Check = Callable[[Client, bool], Awaitable[str]]  # (client, stepwise) -> what is wrong; "" if nothing is


async def check_policies(
    client: Client,
    policies: Sequence[tuple[str, dict[str, str]]],
    check: Check,
    prompt: Tokens,
    greedy: tuple[list[int], NDArray[np.float32]],
    bound: float,
) -> None:
    """Under each policy `check` finds nothing wrong, as one prefill and stepwise, and the answer to `prompt`
    equals `greedy` (tokens and the log-probabilities that they were chosen from) up to near-ties of `bound`
    nats."""
    reference, chosen_from = greedy
    wrong: list[str] = []
    for policy, options in policies:
        await client.set_policy(policy, options)
        for stepwise in (False, True):
            if error := await check(client, stepwise):
                wrong.append(f"{policy} {options} {stepwise=}: {error}")
        answer = client.generate(token_ids=prompt, max_tokens=len(reference), ignore_eos=True)
        tokens = [t.token async for t in answer]
        if not near_tie_or_equal(tokens, reference, chosen_from, bound):
            wrong.append(f"{policy} {options} generate: {tokens} instead of {reference}")
    assert not wrong, "\n".join(wrong)


def exactly(texts: Sequence[Tokens], expected: Sequence[Rows], bound: float) -> Check:
    """Every log-probability of each text differs by less than `bound`."""

    async def check(client: Client, stepwise: bool) -> str:
        found = [await scored(client, tokens, stepwise) for tokens in texts]
        errors = [float(np.abs(ours - rows).max()) for ours, rows in zip(found, expected, strict=True)]
        return ", ".join(f"{error:.2e}" for error in errors if not error < bound)

    return check


def within(
    allowed: Rounding,
    texts: Sequence[Tokens],
    exact: Sequence[Rows],
) -> Check:
    """The distances to exact log-probabilities are rounding as in `allowed` (rounding.py). The first ALONE
    texts are scored one after the other, so that steps are of one token, the others at once."""

    async def check(client: Client, stepwise: bool) -> str:
        ours = [await scored(client, tokens, stepwise) for tokens in texts[:ALONE]]
        ours += await asyncio.gather(*(scored(client, tokens, stepwise) for tokens in texts[ALONE:]))
        return allowed.refusal(Distances.between(ours, exact), ALONE)

    return check


async def scored(client: Client, tokens: Tokens, stepwise: bool) -> Rows:
    """[len(tokens), vocabulary]; stepwise: the second half of them one at a time."""
    prefill = len(tokens) // 2 if stepwise else 1
    blocks = client.score(token_ids=tokens, full=True, stepwise=stepwise, prefill=prefill)
    return np.concatenate([block.logprobs async for block in blocks])
