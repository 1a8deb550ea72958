"""Every message that Tandem's processes and clients exchange, and its number on the wire.

This module is the vocabulary; `codec.py` documents and implements the bytes. A field's annotation is its
wire type and its limits: a receiver checks each value against it before it makes anything of the value.
Arrays travel as one raw frame each. A number is never used again for something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta, Struct, field

Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Float = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # so neither NaN nor infinite
F32Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
F32Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
I32Vector = np.ndarray[tuple[int], np.dtype[np.int32]]
I32Matrix = np.ndarray[tuple[int, int], np.dtype[np.int32]]
I8Matrix = np.ndarray[tuple[int, int], np.dtype[np.int8]]

Ints = Annotated[tuple[Int, ...], Meta(max_length=1 << 20)]
Tree = dict[str, Any]  # values None, bool, int, float (NaN too: they are shown), str, lists and such mappings

HEADER_LIMIT = 4 << 20  # bytes of a message without its arrays
TREE_LIMIT = (
    256 << 10
)  # bytes of that where it holds a Tree, whose lists and maps cost far more than their bytes
TREE_DEPTH = 16  # levels of a Tree; the Tree itself is the first
ARRAY_LIMIT = 256 << 20  # bytes of one array


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages and of the records in them."""


Kind = TypeVar("Kind", bound=type[Record])
TAGS: dict[int, type[Record]] = {}
VERSION = 15
MAX_TOKENS = 128  # of an answer, where a request does not say
CALIBRATION_TOKENS = 8192  # the same of a calibration
SAY_HELLO = "say Hello first"  # the text of the Error that answers a peer without a Welcome


def message(tag: int) -> Callable[[Kind], Kind]:
    """Registers a class as a message with this number."""

    def register(kind: Kind) -> Kind:
        TAGS[tag] = kind
        return kind

    return register


# --- client <-> coordinator -----------------------------------------------------------------------------


class Sampling(Record, frozen=True):
    """Choice of the next token. temperature 0 is greedy, and then only `repetition_penalty` acts."""

    temperature: Float = 0.0
    top_k: Int = 0  # 0: no limit
    top_p: Float = 1.0
    min_p: Float = 0.0
    repetition_penalty: Float = 1.0
    seed: Int | None = None  # None: the engine's seed, counted up by request


class TokenBias(Record, frozen=True):
    """Added to a token's logit."""

    token: Int
    bias: Float


Biases = Annotated[tuple[TokenBias, ...], Meta(max_length=1 << 14)]


class Shaping(Record, frozen=True):
    """Changes of the logits before a token is sampled. The penalties are subtracted from those of tokens that
    the answer has already: `presence_penalty` once, `frequency_penalty` for each time. A `grammar`, in
    llguidance's form, excludes tokens that cannot continue the answer."""

    presence_penalty: Float = 0.0
    frequency_penalty: Float = 0.0
    bias: Biases = ()
    grammar: str = ""  # "": none


class ChatMessage(Record, frozen=True):
    """One turn of a conversation, rendered by the model's chat template. `extra`: a JSON object of what else
    the template reads of a message, such as `tool_calls`; "" without."""

    role: str
    content: str
    extra: str = ""


Turns = Annotated[tuple[ChatMessage, ...], Meta(max_length=1 << 14)]


@message(1)
class Hello(Record, frozen=True):
    """A client's first message. The coordinator answers Welcome, or Error where the versions differ."""

    version: Int
    client: str = ""


@message(2)
class Welcome(Record, frozen=True):
    """The coordinator's answer to Hello: what this engine is."""

    version: Int
    engine: str
    model: str
    fingerprint: str
    device: str
    policy: str
    exact: bool
    vocabulary: Int
    context: Int  # tokens: prompt and answer together
    has_tokenizer: bool
    has_chat_template: bool
    emulation: str = ""  # names --link-gbps and --host-slowdown when they pace this engine
    sampling: Sampling = Sampling()  # what the model's makers recommend for a chat
    format: str = ""  # of the experts
    backbone_dtype: str = ""  # of all the rest
    kv_dtype: str = ""  # of the KV cache


@message(3)
class Generate(Record, frozen=True):
    """Request an answer. Exactly one of `prompt`, `token_ids`, `messages` is given.

    The coordinator answers any number of Queued, Waiting and Token, then one Done with the same `request`.
    `request` is the client's own number, unique among its unfinished requests. With `reuse` only those tokens
    are computed that follow the longest prefix in common with the client's other requests, running or ended;
    without it all are, and nothing of it is kept. The end of a client's connection frees what was kept.

    `resume` are the answer's first tokens if the client has them already (from an engine that exited, for
    example): the answer continues after them. They count against `max_tokens`; the first Token has index
    len(resume).

    With a `rival`, a token id, every step's `runner_up` is that token, whatever its rank, and `margin` says
    by how much the best token exceeds it: for comparing two answers.

    A prompt that leaves fewer than `reserve` tokens of the context for the answer is refused; the refusal's
    stats have its length as `prompt_tokens`.

    `template`: a JSON object of what the chat template reads beside the messages, such as `tools`; or "".
    With `logprobs` of 0 or more each Token has its log-probability and those of so many best tokens.
    With `marks` the text has those special tokens that mark reasoning and calls of tools in the answer.
    Without `counted` the request only finds out whether the engine computes: its steps are in no counter,
    placement by use, map of experts or trace.
    """

    request: Int
    prompt: str | None = None
    token_ids: Ints | None = None
    messages: Turns | None = None
    max_tokens: Int = MAX_TOKENS
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    reuse: bool = True
    resume: Ints = ()
    rival: Int = -1  # -1: the second best token of each step
    reserve: Int = 1
    shaping: Shaping = Shaping()
    logprobs: Int = -1
    template: str = ""
    marks: bool = False
    counted: bool = True


@message(15)
class Queued(Record, frozen=True):
    """A request waits for KV cache or a slot. Sent when it is queued, and as its position changes."""

    request: Int
    position: Int  # 1: the next to be admitted


@message(23)
class Waiting(Record, frozen=True):
    """The step of a request waits for another machine, and `why`. Sent when it has waited for some seconds,
    and now and then; without a reason when it goes on, which a Token says too."""

    request: Int
    why: str


@message(4)
class Token(Record, frozen=True):
    """One new token. `text` can be shown now: whole characters, without anything that may turn out to be part
    of a stop string; it can be empty."""

    request: Int
    index: Int  # 0 for the first new token
    token: Int
    text: str
    margin: Float = 0.0  # the model's largest logit above that of `runner_up`, before any penalty or filter
    runner_up: Int = -1  # the token of the second largest, -1 where there is none; or the Generate's `rival`
    logprob: Float = 0.0  # natural, of the model's own logits; 0 unless the Generate wants `logprobs`
    top_tokens: Ints = ()  # the best tokens of this step, the best first
    top_logprobs: tuple[Float, ...] = ()  # theirs


@message(5)
class Done(Record, frozen=True):
    """The one terminal message of a Generate or Score. `reason`: stop | length | cancelled | error."""

    request: Int
    reason: str
    error: str = ""  # the cause and what to do, if reason is "error"
    text: str = ""  # the rest of the text that Token messages held back
    stats: Tree = {}
    usage: bool = False  # the request is at fault, not the engine


@message(6)
class Cancel(Record, frozen=True):
    """End this client's own request. Its Done follows, with reason "cancelled" unless it ended before."""

    request: Int


@message(7)
class Score(Record, frozen=True):
    """Request log-probabilities of a given text; exactly one of `text`, `token_ids`. Answered by Scores
    blocks in order, each row once, then Done. `stepwise`: the first `prefill` tokens (at least 1) as a
    prefill, the rest one token at a time by the decode path. `full`: send the whole [rows, vocabulary]
    matrix too. `top`: send so many best tokens of each row."""

    request: Int
    text: str | None = None
    token_ids: Ints | None = None
    stepwise: bool = False
    prefill: Int = 1
    full: bool = False
    top: Int = 0


@message(8)
class Scores(Record, frozen=True, eq=False):
    """Rows [start, start+n) of a Score's answer. Row i predicts token i+1 and is natural-log
    probabilities; `tokens` holds the n tokens at those positions; `chosen[j]` is the log-probability
    that row start+j gives to the following token (the text's last row has none, so the last block's
    chosen is one shorter). `logprobs` is [n, vocabulary], or [0, 0] unless `full`. `top_tokens` and
    `top_logprobs` are [n, top], the best first."""

    request: Int
    start: Int
    tokens: I32Vector
    chosen: F32Vector
    logprobs: F32Matrix
    top_tokens: I32Matrix
    top_logprobs: F32Matrix


@message(19)
class Tokenize(Record, frozen=True):
    """Request token ids of exactly one of `text`, `messages` (with `template` as in Generate). Answered by
    Tokenized, or by a Done with the reason why not."""

    request: Int
    text: str | None = None
    messages: Turns | None = None
    template: str = ""


@message(20)
class Tokenized(Record, frozen=True, eq=False):
    """A Tokenize's answer. `ending`: the last characters of a rendered conversation, of which some templates
    begin the answer."""

    request: Int
    ids: I32Vector
    ending: str = ""


@message(9)
class Stats(Record, frozen=True):
    """Request the engine's counters; answered by StatsReply."""

    request: Int


@message(10)
class StatsReply(Record, frozen=True):
    request: Int
    stats: Tree


@message(21)
class ExpertActivity(Record, frozen=True):
    """Request what happened to each expert; answered by ExpertActivityReply. It is counted from the first of
    these on, until a few seconds after the last."""

    request: Int


@message(22)
class ExpertActivityReply(Record, frozen=True, eq=False):
    """Counts by layer and expert [L, E]: its resident tiles, of `tiles`; since the first request the steps
    that used it, its tiles that the device computed, and those of them that had to be fetched first."""

    request: Int
    tiles: Int
    resident: I32Matrix
    used: I32Matrix
    device: I32Matrix
    demanded: I32Matrix


@message(11)
class SetPolicy(Record, frozen=True):
    """Change the policy between two steps; answered by PolicyChanged (sent to every client, with
    `request` -1 for all other clients) or by Error. The coordinator forwards it to the supervisor, so that a
    restarted coordinator begins with this policy."""

    request: Int
    policy: str
    options: dict[str, str] = {}  # option name -> text value, as in --set policy.option=value
    counted: bool = True  # False: the routing of its steps is not counted, as for a measurement


@message(12)
class PolicyChanged(Record, frozen=True):
    request: Int
    policy: str
    exact: bool
    notes: tuple[str, ...] = ()  # options that the policy could not apply, with the reason


@message(16)
class Calibrate(Record, frozen=True):
    """Run the model over a text and write the statistics that policies plan with to a file on the engine's
    machine; exactly one of `text`, `token_ids`. Answered by any number of Calibrating, then by one
    Calibrated, or by a Done with the reason why not. Meanwhile running requests pause and new ones wait.

    At most 131072 `tokens`.

    Of a longer text the engine reads windows from all of it."""

    request: Int
    text: str | None = None
    token_ids: Ints | None = None
    tokens: Int = CALIBRATION_TOKENS  # most tokens used; the rest of the text is left out
    max_loss: Float | None = None  # percent that approximations may add to the perplexity of held-out text


@message(17)
class Calibrating(Record, frozen=True):
    """Progress of a Calibrate: `done` of `total` of a stage, in tokens or the stage's own unit."""

    request: Int
    stage: str
    done: Int
    total: Int


@message(18)
class Calibrated(Record, frozen=True):
    """A Calibrate's answer. `summary`: the main results; see docs/calibration.md."""

    request: Int
    path: str  # of the file, on the engine's machine
    summary: Tree


@message(13)
class Heartbeat(Record, frozen=True):
    """Sent both ways; a peer that is silent for too long counts as lost."""

    time: Float = 0.0  # seconds, the sender's monotonic clock; never echoed


@message(14)
class Error(Record, frozen=True):
    """A message could not be served. `request` -1: not about a request; the connection has ended."""

    request: Int
    text: str


# --- coordinator <-> worker, coordinator <-> prefetcher ------------------------------------------------


@message(32)
class Ready(Record, frozen=True):
    """A child is ready for work. Sent to the supervisor, and by workers and prefetcher to the coordinator.
    Peers refuse another `version` or `fingerprint`."""

    version: Int
    role: str  # loader | coordinator | worker | prefetcher | reader | text | gateway
    index: Int
    generation: Int
    pid: Int
    fingerprint: str
    notes: tuple[str, ...] = ()  # for the user: cores that could not be pinned, for example


@message(33)
class Work(Record, frozen=True, eq=False):
    """Compute some tiles of some experts of one layer, for the rows of `x` that route to them. `descriptor`:
    which (`shm/descriptor.py`)."""

    descriptor: I32Vector
    x: F32Matrix  # [R, hidden]


@message(34)
class Partial(Record, frozen=True, eq=False):
    """The weighted sum over a Work's items, a row for each row of `x`; and what its mask has left out:
    the sum of |u| over rows and channels, of all and of those left out, and how many channels were read."""

    seq: Int
    generation: Int
    busy: Float  # seconds the worker computed, without waiting and transport
    y: F32Matrix  # [R, hidden]
    mass: Float = 0.0
    left: Float = 0.0
    kept: Int = 0  # of `channels`: of all tiles, those that any row keeps
    channels: Int = 0


@message(35)
class WorkFailed(Record, frozen=True):
    """A worker refused a Work (its indices are out of range, for example); the worker continues."""

    seq: Int
    generation: Int
    text: str


@message(36)
class Abandon(Record, frozen=True):
    """The result of this Work is no longer needed: skip it if it has not been started."""

    seq: Int


@message(42)
class AttachLane(Record, frozen=True):
    """Map these segments (`shm/lane.py`): Works come through them from now on, and are answered through
    them."""

    hall: str
    lane: str


@message(37)
class AttachSlab(Record, frozen=True):
    """Map this slab. kind "shm": `handle` is the segment's name; "cuda": a CUDA IPC memory handle."""

    kind: str
    handle: bytes
    device: Int
    slots: Int
    slot_bytes: Int


@message(38)
class SlabAttached(Record, frozen=True):
    """`error`: why the slab cannot be attached by this process."""

    generation: Int
    error: str = ""


@message(39)
class Fetch(Record, frozen=True, eq=False):
    """Copy tiles [lo, lo+len(slots)) of an expert to these slots, in this order; or, where `channels` has
    any, the records of these channels, gathered one after the other, as many to each slot as a tile has."""

    id: Int
    layer: Int
    expert: Int
    lo: Int
    slots: Ints
    urgency: Int  # 1 predicted, 2 placement in the background; smaller overtakes
    channels: I32Vector  # counted over the expert, ascending


@message(40)
class Fetched(Record, frozen=True):
    """`landed` tiles of the order, or channels, are in their slots. `final`: the last report of this order
    (all landed, or it was cancelled and what follows `landed` was not written)."""

    id: Int
    generation: Int
    landed: Int
    final: bool
    seconds: Float  # copying time of this order so far


@message(41)
class CancelFetch(Record, frozen=True):
    """Stop an order after the current tile or chunk of channels; its final Fetched follows."""

    id: Int


# --- coordinator <-> reader --------------------------------------------------------------------------------


@message(43)
class ReadExpert(Record, frozen=True):
    """Read an expert from the store's file to a frame. A second message with the number of an order that is
    not answered changes its urgency."""

    id: Int
    layer: Int
    expert: Int
    frame: Int
    urgency: Int  # 0 demanded, 1 predicted; smaller overtakes


@message(44)
class ExpertRead(Record, frozen=True):
    """The expert is in memory, or `error` says why it is not."""

    id: Int
    generation: Int
    size: Int  # bytes
    error: str = ""


# --- coordinator <-> text process ------------------------------------------------------------------------


@message(49)
class Encode(Record, frozen=True):
    """Request the token ids of a text, or of a conversation, rendered by the model's chat template with
    `template` as in Generate. A `grammar` is checked, and may be all that is."""

    text: str | None = None
    messages: Turns | None = None
    template: str = ""
    grammar: str = ""


@message(50)
class Encoded(Record, frozen=True):
    """The answer to an Encode, or why there is none; `ending` as in Tokenized."""

    ids: I32Vector
    error: str = ""
    ending: str = ""


@message(52)
class Follow(Record, frozen=True):
    """Request the tokens of `vocabulary` that an answer's grammar allows behind `tokens`, which are those
    since the last such request of this answer. With `grammar`, which is compiled first, and counts for
    `client`, they are the whole answer. And request what it allows behind each of `ahead` further tokens at
    most: those that it forces, and `guesses` as far as they follow it."""

    answer: Int
    vocabulary: Int
    tokens: Ints = ()
    grammar: str = ""
    client: bytes = b""
    ahead: Int = 0
    guesses: Ints = ()


@message(53)
class Allowed(Record, frozen=True):
    """The answer to a Follow: a bit for each token that is allowed, the first one's the lowest of the first
    word; none where nothing may follow, or with an error. `guesses`: tokens behind these that follow the
    grammar, `forced` 1 where it allows no other; `masks`: the same bits behind each of them, none set where
    nothing may follow."""

    answer: Int
    mask: I32Vector
    error: str = ""
    guesses: Ints = ()
    forced: Ints = ()
    masks: I32Matrix = field(default_factory=lambda: np.empty((0, 0), np.int32))


@message(54)
class Unfollow(Record, frozen=True):
    """An answer's grammar is followed no further."""

    answer: Int


# --- supervisor <-> children ---------------------------------------------------------------------------


@message(64)
class Progress(Record, frozen=True):
    """Loader or coordinator to supervisor: `done` of `total` bytes of a stage of the start."""

    stage: str
    done: Int
    total: Int


@message(65)
class Failed(Record, frozen=True):
    """A child cannot do its work and exits. `usage`: the user's input is at fault (exit code 2)."""

    role: str
    text: str
    usage: bool


@message(66)
class Shutdown(Record, frozen=True):
    reason: str = ""


@message(67)
class WorkerDied(Record, frozen=True):
    """Supervisor to coordinator: this generation of a worker, prefetcher or reader has exited. `crashed`: it
    failed or hung, and was not ended by a SIGKILL or SIGTERM from outside. `seq`: the Work that it was
    computing, -1 if none."""

    role: str  # worker | prefetcher | reader
    index: Int
    generation: Int
    crashed: bool
    seq: Int


@message(68)
class WorkerUp(Record, frozen=True):
    """Coordinator to supervisor: this generation of a worker or the prefetcher does its work. That is a
    little later than its Ready: a worker has imported its kernels, a prefetcher has mapped the slab."""

    role: str
    index: Int
    generation: Int


@message(70)
class Hung(Record, frozen=True):
    """Coordinator to supervisor: kill this generation, which has work and makes no progress."""

    role: str
    index: Int
    generation: Int


class MachineRecord(Record, frozen=True):
    """A `Machine` of pipeline/config.py."""

    name: str
    endpoint: str
    key: str
    lanes: Ints
    why: str


@message(71)
class SetMachines(Record, frozen=True):
    """Supervisor to coordinator: these machines hold lanes of the experts now."""

    machines: Annotated[tuple[MachineRecord, ...], Meta(max_length=1024)]


@message(69)
class Needed(Record, frozen=True):
    """Coordinator to supervisor: start this child, which the new policy needs and the first one did not."""

    role: str  # prefetcher
