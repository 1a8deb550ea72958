"""One measured run: requests sent together, the arrival of each of their tokens, the engine's counters.
Speeds are taken from the client's clock, so scheduling, transport and the gaps while several answers decode
count. The engine's own `decode_s` adds up the steps of one request without those gaps."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from msgspec.structs import replace

from launch.bench.profile import PhaseProfile, Tree, added
from launch.bench.prompts import Perplexity, Prompt
from launch.errors import AnswerLost, Disturbed, WrongUsage
from pipeline.counters import difference
from pipeline.policies.view import PolicyRequest
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Done, Sampling

# A greedy answer of a small model soon repeats itself, and then uses few experts over and over, unlike text.
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Timeline:
    """Arrival times of the tokens of B requests that were sent together; seconds of one clock."""

    sent: float
    prompt_tokens: int  # P, of each request
    arrivals: tuple[tuple[float, ...], ...]  # [B][G], each ascending

    @property
    def prefill_tok_s(self) -> float:
        """All prompts' tokens a second until the last request's first token. With several requests this time
        includes decode steps between the chunks of later prompts."""
        return len(self.arrivals) * self.prompt_tokens / (self._all_began - self.sent)

    @property
    def first_token_s(self) -> float:
        """The median over the requests."""
        return median(times[0] - self.sent for times in self.arrivals)

    @property
    def decode_steps(self) -> int:
        """Tokens of each request while all decode: from the last one's first token to the first one's end."""
        return min(len(times) - had for times, had in zip(self.arrivals, self._had, strict=True))

    @property
    def decode_tok_s(self) -> float:
        """New tokens of all requests a second while all of them decode; needs `decode_steps` above 0."""
        steps = self.decode_steps
        end = max(times[had + steps - 1] for times, had in zip(self.arrivals, self._had, strict=True))
        return len(self.arrivals) * steps / (end - self._all_began)

    @property
    def _all_began(self) -> float:
        return max(times[0] for times in self.arrivals)

    @property
    def _had(self) -> list[int]:
        """Tokens that each request had at the last request's first token, which is counted."""
        return [bisect_right(times, self._all_began) for times in self.arrivals]


@dataclass(frozen=True)
class Run:
    prefill_tok_s: float
    first_token_s: float
    decode_tok_s: float
    moved_bytes: int  # to the device, in the whole run
    moved_bytes_per_token: float  # in decode, for each new token; background copies count as decode's
    host_share: float  # of the expert tiles of decode, 0..1
    placed_bytes_per_token: float = 0.0  # of those: by placement and replacement, in the background
    decode: Tree = field(default_factory=dict)  # the engine's counters of decode, see pipeline/counters.py


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
    def placed_bytes(self) -> float:
        """Bytes a token that placement and replacement copied in the background: the rounds' median."""
        return median(self.figures("placed_bytes_per_token"))

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
    decode = _grown(before, after, "engine", "decode")
    fetched = _grown(before, after, "engine", "prefill")["fetched_bytes"]
    background = _placed_bytes(after) - _placed_bytes(before)
    later = decode["fetched_bytes"] + background
    predicted = sum(_grown(before, after, "engine", phase)["predicted_tiles"] for phase in rows)
    tiles = decode["host_tiles"] + decode["resident_tiles"] + decode["fetched_tiles"]
    run = Run(
        prefill_tok_s=timeline.prefill_tok_s,
        first_token_s=timeline.first_token_s,
        decode_tok_s=timeline.decode_tok_s,
        moved_bytes=fetched + later,
        moved_bytes_per_token=later / rows["decode"],
        host_share=decode["host_tiles"] / tiles if tiles else 0.0,
        placed_bytes_per_token=(background - predicted * after["tile_bytes"]) / rows["decode"],
        decode=difference(after["engine"]["decode"], before["engine"]["decode"]),
    )
    return run, ends


async def warm_up(client: Client, prompts: Sequence[Prompt], gen_len: int) -> None:
    """Let a policy that was just set fill its cache and learn, on texts that are not measured: as many at
    once as in a measured run, and sampled as there. Raises RequestFailed."""
    for answer in _ask(client, prompts, gen_len):
        await answer.result()


def _ask(client: Client, prompts: Sequence[Prompt], gen_len: int) -> list[Answer]:
    return [
        client.generate(token_ids=p, max_tokens=gen_len, ignore_eos=True, sampling=replace(SAMPLING, seed=i))
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
    return Timeline(sent, len(prompts[0]), tuple(t.result() for t in times)), ends


def _check_undisturbed(
    before: dict[str, Any], after: dict[str, Any], rows: dict[str, int], ends: list[Done]
) -> None:
    """Raises Disturbed unless the engine computed these rows and no others."""
    if any(end.stats.get("preemptions", 0) for end in ends):
        raise Disturbed("requests were preempted: the KV cache is full; use a smaller --batch")
    if any(end.stats.get("kv_reused_tokens", 0) for end in ends):
        raise Disturbed("the prompts were not prefilled as a whole: KV of an earlier request was reused")
    for phase, expected in rows.items():
        if _grown(before, after, "engine", phase)["rows"] != expected:
            raise Disturbed("another client's requests ran meanwhile; run bench without --connect")


def _grown(before: dict[str, Any], after: dict[str, Any], *keys: str) -> dict[str, int]:
    """after - before of the integers under `keys`."""
    for key in keys:
        before, after = before[key], after[key]
    return {key: value - before[key] for key, value in after.items() if isinstance(value, int)}


def _placed_bytes(stats: dict[str, Any]) -> int:
    """Bytes copied to the device in the background so far; 0 for an engine without an expert cache."""
    return int(stats.get("cache", {}).get("placed_tiles", 0) * stats["tile_bytes"])
