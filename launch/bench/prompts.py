"""What `bench` has an engine read: held-out text where the model has a tokenizer, else seeded random ids.

The cost of an approximation is the perplexity of such text under it and under an exact policy, measured in
decode, where the approximation acts: the beginning of each text is prefilled, the rest is fed one token at a
time, and only the log-probabilities of those steps count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.errors import WrongUsage
from pipeline.assets import heldout
from pipeline.policies.placements import ENOUGH_TOKENS
from protocol.client import Client

Prompt = tuple[int, ...]

SPECIAL_TOKENS = 8  # at most so many are put around a text by a tokenizer
BYTES_PER_TOKEN = 4  # a first guess; where it is too small, more text follows
TAIL_BYTES_PER_TOKEN = 8  # more than the average of any text
OTHER_TOKENS = 128  # of each kind of text, that are read before anything is measured
LEAST = 32  # scored tokens of each text; fewer tokens in all are taken from fewer texts
STRIDE = 20_000  # bytes between two prompts from the same text


async def make_prompts(client: Client, count: int, length: int, seed: int, first: int = 0) -> list[Prompt]:
    """Prompts `first` to `first + count` of a row of different ones, each of exactly `length` token ids. The
    measured engine tokenizes the text (Scores carry the token ids), in about the time of one prefill of the
    prompts. Raises RequestFailed."""
    if not client.welcome.has_tokenizer:
        random = np.random.default_rng(seed)
        ids = random.integers(0, client.welcome.vocabulary, (first + count, length))
        return [tuple(row) for row in ids[first:].tolist()]
    texts = [path.read_bytes() for path in heldout().values()]
    return [await _read(client, _beginning(texts, first + i), length) for i in range(count)]


async def read_other_texts(client: Client, seed: int) -> None:
    """Have the engine read text of every kind that is not measured, from the middle of the files, so that it
    counts the use of its experts. Raises RequestFailed."""
    length = min(OTHER_TOKENS, client.welcome.context)
    if not client.welcome.has_tokenizer:
        for ids in await make_prompts(client, -(-ENOUGH_TOKENS // length), length, seed + 2):
            async for _ in client.score(token_ids=ids):
                pass
        return
    for text in [path.read_bytes() for path in heldout().values()]:
        await _read(client, text[text.find(b"\n", len(text) // 2) + 1 :], length)


async def make_texts(client: Client, count: int, length: int, seed: int) -> list[Prompt]:
    """`count` texts of exactly `length` token ids, each of another kind, for perplexities: from the ends of
    the files, which the prompts do not reach unless they are long. Raises RequestFailed."""
    if not client.welcome.has_tokenizer:
        return await make_prompts(client, count, length, seed + 1)
    texts = [path.read_bytes() for path in heldout().values()]
    return [await _read(client, _end(texts, i % len(texts), length), length) for i in range(count)]


def _end(texts: list[bytes], which: int, length: int) -> bytes:
    """The last lines of a text, enough for `length` tokens of most tokenizers, then the other texts."""
    text = texts[which]
    start = text.find(b"\n", max(0, len(text) - TAIL_BYTES_PER_TOKEN * length)) + 1
    return b"".join([text[start:], *texts[which + 1 :], *texts[:which]])


def _beginning(texts: list[bytes], index: int) -> bytes:
    """All texts as a ring, from where prompt `index` starts: each text's beginning, then STRIDE on."""
    lap, which = divmod(index, len(texts))
    text = texts[which]
    start = lap * STRIDE % len(text)
    start = text.find(b"\n", start) + 1 if start else 0  # a whole line; also a whole character
    return b"".join([text[start:], *texts[which + 1 :], *texts[:which], text[:start]])


async def _read(client: Client, text: bytes, length: int) -> Prompt:
    # A token is at least a byte of text, so a piece of so many bytes never exceeds the context.
    largest = max(4, client.welcome.context - SPECIAL_TOKENS)
    ids: list[int] = []
    position = 0
    while len(ids) < length:
        size = min(largest, BYTES_PER_TOKEN * (length - len(ids)) + SPECIAL_TOKENS)
        piece = text[position : position + size].decode("utf-8", "ignore")  # cut within a character
        position = (position + len(piece.encode())) % len(text)
        more: list[int] = []
        async for block in client.score(text=piece):
            more += block.tokens.tolist()
        # a beginning-of-text token is kept in front of the first piece only
        ids += more[1:] if ids and len(more) > 1 and more[0] == ids[0] else more
    return tuple(ids[:length])


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
