"""Has an engine do what `bench` measures: text to read, measured runs, perplexities.

The text is held-out where the model has a tokenizer, else seeded random ids. In a run requests are sent
together; speeds are taken from the arrivals of their tokens by the client's clock, so scheduling, transport
and the gaps while several answers decode count. The engine's own `decode_s` adds up the steps of one request
without those gaps.

The cost of an approximation is the perplexity of text under it and under an exact policy, measured in decode,
where the approximation acts: the beginning of each text is prefilled, the rest is fed one token at a time,
and only the log-probabilities of those steps count.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from launch.errors import AnswerLost, Disturbed, WrongUsage
from launch.profile import PhaseProfile, Tree, added
from pipeline.assets import heldout
from pipeline.counters import difference
from pipeline.policies.placements import ENOUGH_TOKENS
from pipeline.policies.view import PolicyRequest
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Done, Sampling

Prompt = tuple[int, ...]

SPECIAL_TOKENS = 8  # at most so many are put around a text by a tokenizer
BYTES_PER_TOKEN = 4  # a first guess; where it is too small, more text follows
OTHER_TOKENS = 128  # of each kind of text, that are read before anything is measured
LEAST = 32  # scored tokens of each text; fewer tokens in all are taken from fewer texts
STRIDE = 20_000  # bytes between two prompts from the same text
# Places in the row of prompts, behind the measured ones: texts for perplexities, and others that are read.
SCORED, OTHERS = 1000, 2000


async def make_prompts(client: Client, count: int, length: int, seed: int, first: int = 0) -> list[Prompt]:
    """Prompts `first` to `first + count` of a row of different ones, each of exactly `length` token ids. The
    measured engine tokenizes the text (Scores carry the token ids), in about the time of one prefill of the
    prompts. Raises RequestFailed."""
    places = range(first, first + count)
    if not client.welcome.has_tokenizer:
        ids = (
            np.random.default_rng((seed, i)).integers(0, client.welcome.vocabulary, length) for i in places
        )
        return [tuple(row.tolist()) for row in ids]
    texts = [path.read_bytes() for path in heldout().values()]
    return [await _read(client, _beginning(texts, i), length) for i in places]


async def read_other_texts(client: Client, seed: int) -> None:
    """Have the engine read text of every kind that is not measured, so that it counts the use of its experts.
    Raises RequestFailed."""
    length = min(OTHER_TOKENS, client.welcome.context)
    count = max(len(heldout()), -(-ENOUGH_TOKENS // length))
    for ids in await make_prompts(client, count, length, seed, first=OTHERS):
        if not client.welcome.has_tokenizer:  # else they were read to be tokenized
            async for _ in client.score(token_ids=ids):
                pass


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
    exact_policy: str
    tokens: int  # scored
    prefill: int  # tokens of each text before the scored ones

    @property
    def percent(self) -> float:
        """Returns how much the approximation adds."""
        return 100 * (self.approximate / self.exact - 1)

    def to_map(self) -> dict[str, object]:
        return asdict(self) | {"difference_percent": self.percent}


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
        texts = await make_prompts(client, count, prefill + each + 1, seed, first=SCORED)
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


# --- runs ---------------------------------------------------------------------------------------------

# A greedy answer of a small model soon repeats itself, and then uses few experts over and over, unlike text.
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Timeline:
    """Arrival times of the tokens of B requests that were sent together; seconds of one clock."""

    sent: float
    prompt_tokens: int  # P, of each request
    arrivals: NDArray[np.float64]  # [B, G], each row ascending

    @property
    def prefill_tok_s(self) -> float:
        """All prompts' tokens a second until the last request's first token. With several requests this time
        includes decode steps between the chunks of later prompts."""
        return float(len(self.arrivals) * self.prompt_tokens / (self._all_began - self.sent))

    @property
    def first_token_s(self) -> float:
        """The median over the requests."""
        return float(np.median(self.arrivals[:, 0]) - self.sent)

    @property
    def decode_steps(self) -> int:
        """Tokens of each request while all decode: from the last one's first token to the first one's end."""
        return int(self.arrivals.shape[1] - self._had.max())

    @property
    def decode_tok_s(self) -> float:
        """New tokens of all requests a second while all of them decode; needs `decode_steps` above 0."""
        steps = self.decode_steps
        end = self.arrivals[np.arange(len(self.arrivals)), self._had + steps - 1].max()
        return float(len(self.arrivals) * steps / (end - self._all_began))

    @property
    def _all_began(self) -> float:
        return float(self.arrivals[:, 0].max())

    @property
    def _had(self) -> NDArray[np.int64]:
        """Tokens that each request had at the last request's first token, which is counted."""
        had: NDArray[np.int64] = (self.arrivals <= self._all_began).sum(axis=1)
        return had


@dataclass(frozen=True)
class Run:
    """One round of one policy."""

    prefill_tok_s: float
    first_token_s: float
    decode_tok_s: float
    decode: Tree  # the engine's counters of decode, see pipeline/counters.py
    energy: dict[str, float] = field(default_factory=dict)  # joules of the machine, a generated token; prompt
    # included, by what has counters (pipeline/energy.py)


@dataclass
class PolicyResult:
    """One policy's runs, in the order of the rounds."""

    request: PolicyRequest
    exact: bool = True
    notes: list[str] = field(default_factory=list)  # from the engine, without repetitions
    runs: list[Run] = field(default_factory=list)
    perplexity: Perplexity | None = None  # of an approximate policy
    left_out: str = ""  # why the policy cannot run here

    def ratio(self, first: PolicyResult, figure: str) -> float:
        """The median of the rounds' ratios to the first policy. A round's runs are neighbours in time, so
        a drift of the machine's speed weighs less in it than in the ratio of two medians."""
        pairs = zip(self.figures(figure), first.figures(figure), strict=True)
        return median(mine / its for mine, its in pairs)

    def figures(self, name: str) -> list[float]:
        """A field of Run, in the order of the rounds."""
        return [float(getattr(run, name)) for run in self.runs]

    @property
    def energy(self) -> dict[str, float]:
        """`Run.energy`, the medians of the rounds."""
        return {name: median(run.energy[name] for run in self.runs) for name in self.runs[0].energy}

    def decode(self, tile_bytes: int) -> PhaseProfile:
        """The engine's counters of decode, summed over the rounds."""
        return PhaseProfile(added(run.decode for run in self.runs), tile_bytes)


async def measure(client: Client, prompts: Sequence[Prompt], gen_len: int) -> tuple[Run, list[Done]]:
    """Send all prompts (of one length) at once and wait for exactly `gen_len` new tokens of each, at least 2.
    Returns the figures and each request's Done. Raises Disturbed, WrongUsage where no step would have all
    requests decode, AnswerLost, RequestFailed."""
    before = await client.stats()
    timeline, ends = await _generate(client, prompts, gen_len)
    after = await client.stats()
    rows = {"prefill": sum(map(len, prompts)), "decode": len(prompts) * (gen_len - 1)}
    _check_undisturbed(before, after, rows, ends)
    if timeline.decode_steps < 1:
        raise WrongUsage(
            f"--gen-len {gen_len} is too short for --batch {len(prompts)}: the first answers end before the"
            " last ones begin; use longer answers, shorter prompts or fewer requests"
        )
    counted = difference(after["engine"], before["engine"])
    speeds = (timeline.prefill_tok_s, timeline.first_token_s, timeline.decode_tok_s)
    tokens = len(prompts) * gen_len
    energy = {name: (now - before["energy"][name]) / tokens for name, now in after["energy"].items()}
    return Run(*speeds, decode=counted["decode"], energy=energy), ends


async def warm_up(client: Client, prompts: Sequence[Prompt], gen_len: int) -> None:
    """Let a policy that was just set fill its cache and learn, on texts that are not measured: as many at
    once as in a measured run, and sampled as there. Raises RequestFailed."""
    for answer in _ask(client, prompts, gen_len):
        await answer.result()


def _ask(client: Client, prompts: Sequence[Prompt], gen_len: int) -> list[Answer]:
    return [
        client.generate(
            token_ids=p,
            max_tokens=gen_len,
            ignore_eos=True,
            sampling=replace(SAMPLING, seed=i),
            reuse=False,
        )
        for i, p in enumerate(prompts)
    ]


async def _generate(client: Client, prompts: Sequence[Prompt], gen_len: int) -> tuple[Timeline, list[Done]]:
    async def arrivals(answer: Answer) -> tuple[float, ...]:
        return tuple([time.perf_counter() async for _ in answer])

    sent = time.perf_counter()
    answers = _ask(client, prompts, gen_len)
    try:
        async with asyncio.TaskGroup() as group:
            times = [group.create_task(arrivals(answer)) for answer in answers]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # all have the same cause
    ends = [answer.done for answer in answers if answer.done is not None]
    for end, its in zip(ends, times, strict=True):
        if end.reason == "cancelled":
            raise AnswerLost("the engine cancelled the requests; it is shutting down")
        if len(its.result()) != gen_len:
            raise AnswerLost(f"an answer has {len(its.result())} tokens instead of {gen_len}")
    return Timeline(sent, len(prompts[0]), np.array([its.result() for its in times])), ends


def _check_undisturbed(
    before: dict[str, Any], after: dict[str, Any], rows: dict[str, int], ends: list[Done]
) -> None:
    """Raises Disturbed unless the engine computed these rows and no others."""
    if any(end.stats.get("preemptions", 0) for end in ends):
        raise Disturbed("requests were preempted: the KV cache is full; use a smaller --batch")
    for phase, expected in rows.items():
        if after["engine"][phase]["rows"] - before["engine"][phase]["rows"] != expected:
            raise Disturbed("another client's requests ran meanwhile; run bench without --connect")
