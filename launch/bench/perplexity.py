"""What an approximation costs: the perplexity of held-out text under it, beside that under an exact policy.

It is measured where the approximation acts, in decode: the beginning of each text is prefilled, then its
tokens come one at a time, and only what those steps say of the next token counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.bench.prompts import Prompt, make_texts
from launch.errors import WrongUsage
from pipeline.assets import heldout
from protocol.client import Client

LEAST = 32  # tokens of each text, unless fewer are asked for: of fewer kinds of text then


@dataclass(frozen=True)
class Perplexity:
    """Of the same text, under an approximate policy and an exact one."""

    approximate: float
    exact: float
    policy: str  # the exact one
    tokens: int
    prefill: int  # tokens before those, of each text

    @property
    def percent(self) -> float:
        """How much the approximation adds."""
        return 100 * (self.approximate / self.exact - 1)

    def to_map(self) -> dict[str, object]:
        """For JSON."""
        return {
            "approximate": self.approximate,
            "exact": self.exact,
            "exact_policy": self.policy,
            "difference_percent": self.percent,
            "tokens": self.tokens,
            "prefill": self.prefill,
        }


@dataclass(frozen=True)
class Texts:
    """Each of `prefill` tokens and those of which the perplexity is taken."""

    ids: Sequence[Prompt]
    prefill: int

    @property
    def tokens(self) -> int:
        """Of which the perplexity is taken."""
        return sum(len(ids) - self.prefill - 1 for ids in self.ids)

    @classmethod
    async def make(cls, client: Client, tokens: int, prefill: int, seed: int) -> Texts:
        """Several kinds of held-out text, `tokens` to be scored in all. Raises WrongUsage where the engine's
        context is too short, RequestFailed, EngineGone."""
        count = max(1, min(len(heldout()), tokens // LEAST))
        each = -(-tokens // count)
        room = client.welcome.context - each - 1
        if room < 1:
            raise WrongUsage(
                f"--ppl-tokens {tokens}: {each} tokens of a text and one before them do not fit the context,"
                f" {client.welcome.context}; use fewer"
            )
        prefill = min(prefill, room)
        texts = await make_texts(client, count, prefill + each + 1, seed)
        spare = count * each - tokens  # less than one for each text
        return cls([*texts[:-1], texts[-1][: len(texts[-1]) - spare]], prefill)

    async def perplexity(self, client: Client) -> float:
        """Under the engine's policy now. Raises RequestFailed, EngineGone."""
        nll = 0.0
        for ids in self.ids:
            async for block in client.score(token_ids=ids, stepwise=True, prefill=self.prefill):
                behind = max(0, self.prefill - block.start)  # of the prefill's rows
                nll -= float(block.chosen[behind:].sum(dtype="float64"))
        mean = nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf
