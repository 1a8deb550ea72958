"""The load of a stress run: a script's entries, sent as requests by clients with connections of their own,
and their outcomes.

A script is one JSON object a line, a request or a conversation of several requests.


    {"name": "greeting", "prompt": "Good morning,", "max_tokens": 32}
    {"messages": [{"role": "user", "content": "What is a list?"}], "temperature": 0.8, "seed": 7}
    {"turns": ["What is a list?", "And a tuple?"], "cancel_after": 5, "delay": 0.5}

Exactly one of
  prompt        text to continue, without a chat template
  messages      a conversation so far, rendered by the chat template
  turns         a user's messages in one conversation; each answer becomes part of the next prompt
and optionally
  max_tokens    longest answer, in tokens (64)
  temperature   0: greedy, and only greedy answers are compared (0)
  seed          of the sampling
  cancel_after  tokens after which each answer is cancelled; 0: at once
  delay         seconds to wait before the first request
  name          a label for reports ("line N")

The file is UTF-8; blank lines are skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from launch.command_line.checks import WrongLine, parse_line, read_lines
from launch.equality import Comparison, Step, Verdict, compare
from protocol.client import Client
from protocol.codec import encode
from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed
from protocol.messages import ChatMessage, Generate, Sampling, Token

SILENCE = 120.0  # seconds without a message, after which a request counts as lost
PROMPTS = ("prompt", "messages", "turns")
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a script; exactly one of `prompt`, `messages`, `turns` is not None."""

    name: str = ""
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1)] | None = None
    turns: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 64
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    seed: Count | None = None
    cancel_after: Count | None = None
    delay: Annotated[float, Meta(ge=0, le=600)] = 0.0  # seconds

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def requests(self) -> int:
        return 1 if self.turns is None else len(self.turns)


def read_script(path: Path) -> list[Entry]:
    """Returns a script's requests. Raises WrongUsage, one line with the file and the line's number, for an
    invalid script."""
    return read_lines(path, _entry, "request")


def _entry(line: str, number: int) -> Entry:
    """Returns the request of a line. Raises WrongLine with the reason."""
    entry = parse_line(line, Entry)
    if sum(getattr(entry, kind) is not None for kind in PROMPTS) != 1:
        raise WrongLine(f"give exactly one of {', '.join(PROMPTS)}")
    entry = msgspec.structs.replace(entry, name=entry.name or f"line {number}")
    if not entry.name.isprintable() or not entry.name.strip():
        raise WrongLine("name must be a string of one line")
    try:
        encode(Generate(0, entry.prompt, messages=entry.messages, sampling=entry.sampling))
        for text in (entry.name, *(entry.turns or ())):
            encode(Generate(0, text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return entry


# --- requests and outcomes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request: what to send, and when to cancel it; exactly one of `prompt` and `messages` is not None."""

    label: str
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    max_tokens: int
    sampling: Sampling
    cancel_after: int | None = None  # tokens
    reuse: bool = True  # of KV of other requests
    resume: tuple[int, ...] = ()  # the answer's first tokens, to be prefilled with the prompt
    rival: int = -1  # the token that every step is to measure in place of its runner-up

    @property
    def deterministic(self) -> bool:
        return self.sampling.temperature == 0


class End(StrEnum):
    STOP = "stop"  # by the model
    LENGTH = "length"  # by max_tokens or the context
    CANCELLED = "cancelled"  # by cancel_after
    REFUSED = "refused"  # the request is invalid, e.g. too long for the context
    FAILED = "failed"
    GONE = "gone"  # the engine ended
    LOST = "lost"  # no terminal message


@dataclass
class Outcome:
    """An answer as received. Times are seconds of one monotonic clock."""

    request: Request
    sent: float
    tokens: list[Token] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # of each token
    end: End = End.LOST
    ended: float = 0.0
    text: str = ""  # "" unless the request was served
    error: str = ""
    stats: dict[str, Any] = field(default_factory=dict)  # of Done

    @property
    def served(self) -> bool:
        return self.end in (End.STOP, End.LENGTH, End.CANCELLED)

    @property
    def steps(self) -> list[Token | Step]:
        """The chosen tokens, including the one that ended the answer."""
        end = self.stats.get("end")
        return [*self.tokens, *([Step(end["token"], end["runner_up"], end["margin"])] if end else [])]

    @property
    def in_order(self) -> bool:
        return [token.index for token in self.tokens] == list(range(len(self.tokens)))


async def ask(client: Client, request: Request, silence: float = SILENCE) -> Outcome:
    """Send a request and receive its answer. Errors become part of the outcome."""
    outcome = Outcome(request, time.perf_counter())
    try:
        async with asyncio.timeout(silence) as limit:
            await _receive(client, outcome, limit, silence)
    except TimeoutError:
        outcome.error = f"no message for {silence:g} s after {len(outcome.tokens)} tokens"
    except RequestFailed as e:
        outcome.end, outcome.error = End.REFUSED if e.usage else End.FAILED, str(e)
    except EngineGone as e:
        outcome.end, outcome.error = End.GONE, str(e)
    except ProtocolError as e:
        outcome.end, outcome.error = End.FAILED, str(e)
    outcome.ended = time.perf_counter()
    return outcome


async def _receive(client: Client, outcome: Outcome, limit: asyncio.Timeout, silence: float) -> None:
    loop = asyncio.get_running_loop()
    request = outcome.request

    def extend_limit(_position: int = 0) -> None:
        # A queue position may arrive when the limit has just passed, or the answer has just ended.
        if not limit.expired() and not outcome.ended:
            limit.reschedule(loop.time() + silence)

    answer = client.generate(
        prompt=request.prompt,
        messages=request.messages,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        reuse=request.reuse,
        resume=request.resume,
        rival=request.rival,
    )
    answer.on_queued = extend_limit
    if request.cancel_after == 0:
        await answer.cancel()
    async for token in answer:
        outcome.arrivals.append(time.perf_counter())
        outcome.tokens.append(token)
        extend_limit()
        if len(outcome.tokens) == request.cancel_after:
            await answer.cancel()
    assert answer.done is not None  # the loop above raises otherwise
    outcome.end, outcome.stats = End(answer.done.reason), answer.done.stats
    outcome.text = "".join(token.text for token in outcome.tokens) + answer.done.text
    enough = request.cancel_after is not None and len(outcome.tokens) >= request.cancel_after
    if outcome.end is End.CANCELLED and not enough:
        outcome.end, outcome.error = End.FAILED, "the engine cancelled this answer"


@dataclass
class Load:
    """The outcomes of the clients' requests so far."""

    outcomes: list[list[Outcome]]  # of each client, in the order in which they ended
    unsent: int = 0  # turns after an unserved one, and entries left in the queue when all clients stopped
    seconds: float = 0.0
    strays: dict[int, int] = field(default_factory=dict)  # client -> messages for requests that had ended

    @property
    def all(self) -> list[Outcome]:
        return [outcome for outcomes in self.outcomes for outcome in outcomes]


async def run_load(
    clients: list[Client], entries: Iterable[Entry], load: Load, ended: Callable[[Outcome], None]
) -> None:
    """Send every entry once, and call `ended` for each request. A client stops when its engine has ended."""
    queue = deque(entries)
    began = time.perf_counter()

    async def serve(client: Client, outcomes: list[Outcome]) -> None:
        while queue:
            entry = queue.popleft()
            served = 0
            async for outcome in _serve(client, entry):
                served += 1
                outcomes.append(outcome)
                ended(outcome)
            load.unsent += entry.requests - served
            if outcomes[-1].end is End.GONE:
                break

    try:
        async with asyncio.TaskGroup() as group:
            for client, outcomes in zip(clients, load.outcomes, strict=True):
                group.create_task(serve(client, outcomes))
    finally:
        load.seconds = time.perf_counter() - began
        load.unsent += sum(entry.requests for entry in queue)


async def count_strays(clients: list[Client], load: Load) -> None:
    """Set `load.strays`; to be called when no request runs. Messages sent before a Stats arrive before it."""
    for number, client in enumerate(clients):
        await client.stats()
        load.strays[number] = client.strays


async def _serve(client: Client, entry: Entry) -> AsyncIterator[Outcome]:
    await asyncio.sleep(entry.delay)
    request = Request(
        entry.name, entry.prompt, entry.messages, entry.max_tokens, entry.sampling, entry.cancel_after
    )
    if entry.turns is None:
        yield await ask(client, request)
        return
    messages: tuple[ChatMessage, ...] = ()
    for number, text in enumerate(entry.turns, 1):
        messages += (ChatMessage("user", text),)
        label = f"{entry.name}, turn {number}"
        turn = replace(request, label=label, messages=messages)
        outcome = await ask(client, turn)
        yield outcome
        if not outcome.served:
            return
        messages += (ChatMessage("assistant", outcome.text),)


# ----------------------------------------------------------------------------------------------------------
# Compares each deterministic answer of a load with the same request run alone, by `equality.py`'s rule.


DIVISIONS = 16  # of one answer's past into prefill and decode, at most, to measure a token


@dataclass(frozen=True)
class Finding:
    """The comparison of a request's answer with that of the same request alone."""

    label: str
    comparison: Comparison
    why: str = ""  # a difference other than in the tokens

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict

    def __str__(self) -> str:
        difference = self.comparison
        if difference.at is None:
            return f"{self.label}: {self.why or difference.verdict}"
        tie = "" if difference.margin is None else f", {difference.margin:.3g} nats less likely"
        ours, expected = _token(difference.ours), _token(difference.expected)
        return f"{self.label}: token {difference.at} is {ours}{tie}; alone {expected}"


def alone(outcome: Outcome) -> Request | None:
    """The request to run alone for a comparison: without KV of other ones, and in place of a Cancel with a
    limit of as many tokens as had arrived. None for an outcome that cannot be compared."""
    request = replace(outcome.request, label="", cancel_after=None, reuse=False)
    cut = outcome.end is End.CANCELLED
    if not request.deterministic or (cut and not outcome.tokens):
        return None
    if not outcome.served and outcome.end is not End.REFUSED:
        return None
    return replace(request, max_tokens=len(outcome.tokens)) if cut else request


async def compare_all(
    client: Client, outcomes: Iterable[Outcome], bound: float, compared: Callable[[Finding], None]
) -> None:
    """Run each different request once, in turn; call `compared` for every outcome. Raises EngineGone."""
    groups: dict[Request, list[Outcome]] = {}
    for outcome in outcomes:
        request = alone(outcome)
        if request is not None:
            groups.setdefault(request, []).append(outcome)
    for request, group in groups.items():
        reference = await ask(client, request)
        if reference.end is End.GONE:
            raise EngineGone(reference.error)
        for outcome in group:
            finding = judge(outcome, reference, bound)
            compared(await _measured(client, request, outcome, finding, bound))


async def _measured(
    client: Client, request: Request, outcome: Outcome, finding: Finding, bound: float
) -> Finding:
    """A mismatch of two tokens, judged by the reference's log-probabilities of the answer's token: with the
    past decoded, as in the reference, and where that is beyond the bound, with a part of it prefilled. Each
    is one more run of the request alone, up to that token. A run that differs before it measures nothing."""
    difference = finding.comparison
    at, ours = difference.at, difference.ours
    if finding.verdict is not Verdict.MISMATCH or at is None or ours is None or difference.expected is None:
        return finding
    past = tuple(step.token for step in outcome.steps[:at])
    divisions = range(at, 0, -max(1, -(-at // DIVISIONS)))
    for prefilled in (0, *divisions) if difference.margin is None else divisions:
        resume = past[:prefilled]
        run = await ask(client, replace(request, max_tokens=at + 1, resume=resume, rival=ours))
        if run.end is End.GONE:
            raise EngineGone(run.error)
        steps = run.steps
        if tuple(step.token for step in steps[:-1]) != past[prefilled:]:
            continue
        margin = steps[-1].margin
        if difference.margin is None or margin < bound:
            difference = replace(difference, margin=margin)
        if margin < bound:
            return replace(finding, comparison=replace(difference, verdict=Verdict.NEAR_TIE))
    return replace(finding, comparison=difference)


def judge(outcome: Outcome, reference: Outcome, bound: float) -> Finding:
    """`reference`: the outcome of the same request alone."""
    label, cut = outcome.request.label, outcome.end is End.CANCELLED
    if not (outcome.served and reference.served):
        if (outcome.end, outcome.error) == (reference.end, reference.error):
            return Finding(label, Comparison(Verdict.EQUAL))
        why = f"{_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    difference = compare([step.token for step in outcome.steps], reference.steps, bound)
    if difference.verdict is Verdict.EQUAL and outcome.text != reference.text:
        why = f"equal tokens, but the text {outcome.text!r:.60}; alone {reference.text!r:.60}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    if difference.verdict is Verdict.EQUAL and not cut and outcome.end is not reference.end:
        why = f"equal tokens, but {_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    return Finding(label, difference)


def _ended(outcome: Outcome) -> str:
    return f"{outcome.end}: {outcome.error}" if outcome.error else str(outcome.end)


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)
