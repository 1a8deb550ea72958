"""The cost of an approximation: the perplexity of held-out text under it, and under an exact policy. It is
measured in decode, where the approximation acts: the beginning of each text is prefilled, the rest is fed one
token at a time, and only the log-probabilities of those steps count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.bench.prompts import Prompt, make_texts
from launch.errors import WrongUsage
from pipeline.assets import heldout
from protocol.client import Client

LEAST = 32  # scored tokens of each text; fewer tokens in all are taken from fewer texts


@dataclass(frozen=True)
class Perplexity:
    """Perplexities of the same text under an approximate policy and an exact one."""

    approximate: float
    exact: float
    policy: str  # the exact one's name
    tokens: int  # scored
    prefill: int  # tokens of each text before the scored ones

    @property
    def percent(self) -> float:
        """How much the approximation adds."""
        return 100 * (self.approximate / self.exact - 1)

    def to_map(self) -> dict[str, object]:
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
    """Held-out texts: `prefill` tokens of each, and then the tokens that are scored."""

    ids: Sequence[Prompt]
    prefill: int

    @property
    def tokens(self) -> int:
        """Scored tokens of all texts."""
        return sum(len(ids) - self.prefill - 1 for ids in self.ids)

    @classmethod
    async def make(cls, client: Client, tokens: int, prefill: int, seed: int) -> Texts:
        """`tokens`: scored, of all texts. Raises WrongUsage for a short context, RequestFailed."""
        count = max(1, min(len(heldout()), tokens // LEAST))
        each = -(-tokens // count)
        longest = client.welcome.context - each - 1  # prefill that fits
        if longest < 1:
            raise WrongUsage(
                f"--ppl-tokens {tokens}: {each} tokens of each text after one of prefill exceed the context,"
                f" {client.welcome.context}; use fewer"
            )
        prefill = min(prefill, longest)
        texts = await make_texts(client, count, prefill + each + 1, seed)
        spare = count * each - tokens  # less than one for each text
        return cls([*texts[:-1], texts[-1][: len(texts[-1]) - spare]], prefill)

    async def perplexity(self, client: Client) -> float:
        """The perplexity under the engine's present policy. Raises RequestFailed, EngineGone."""
        nll = 0.0
        for ids in self.ids:
            async for block in client.score(token_ids=ids, stepwise=True, prefill=self.prefill):
                behind = max(0, self.prefill - block.start)  # of the prefill's rows
                nll -= float(block.chosen[behind:].sum(dtype="float64"))
        mean = nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf
