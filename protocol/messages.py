"""Every message that Tandem's processes and clients exchange, as frozen dataclasses.

This module is the vocabulary; `codec.py` documents and implements the bytes. A field's annotation is
its wire type: the codec checks each value against it before anything is allocated. Allowed are `int`,
`float`, `str`, `bool`, `bytes`, `X | None`, `tuple[X, ...]`, `Tree` (a JSON-like mapping), another
record of this module, and the array types below (each travels as one raw frame).

`TAGS` gives each message its number on the wire. A number is never used again for something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ArraySpec:
    """The wire type of an array field: numpy dtype name and number of dimensions, C order."""

    dtype: str
    ndim: int


F32Vector = Annotated[NDArray[np.float32], ArraySpec("float32", 1)]
F32Matrix = Annotated[NDArray[np.float32], ArraySpec("float32", 2)]
I32Vector = Annotated[NDArray[np.int32], ArraySpec("int32", 1)]
I32Matrix = Annotated[NDArray[np.int32], ArraySpec("int32", 2)]

JsonObject = dict[str, Any]
# str keys; values None, bool, int, float, str, and lists and mappings of these
Tree = Annotated[JsonObject, "tree"]


# --- client <-> coordinator -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy, and then only `repetition_penalty` acts."""

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: the engine's seed, counted up by request


@dataclass(frozen=True)
class TokenBias:
    """Added to a token's logit."""

    token: int
    bias: float


@dataclass(frozen=True)
class Shaping:
    """Changes of the logits before a token is sampled. The penalties are subtracted from those of tokens that
    the answer has already: `presence_penalty` once, `frequency_penalty` for each time. A `grammar`, in
    llguidance's form, excludes tokens that cannot continue the answer."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[TokenBias, ...] = ()
    grammar: str = ""  # "": none


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation, rendered by the model's chat template. `extra`: a JSON object of what else
    the template reads of a message, such as `tool_calls`; "" without."""

    role: str
    content: str
    extra: str = ""


@dataclass(frozen=True)
class Hello:
    """A client's first message. The coordinator answers Welcome, or Error where the versions differ."""

    version: int
    client: str = ""


@dataclass(frozen=True)
class Welcome:
    """The coordinator's answer to Hello: what this engine is."""

    version: int
    engine: str
    model: str
    fingerprint: str
    device: str
    policy: str
    exact: bool
    vocabulary: int
    context: int  # tokens: prompt and answer together
    has_tokenizer: bool
    has_chat_template: bool
    emulation: str = ""  # names --link-gbps and --host-slowdown when they pace this engine
    sampling: Sampling = field(default_factory=Sampling)  # what the model's makers recommend for a chat
    format: str = ""  # of the experts
    backbone_dtype: str = ""  # of all the rest


@dataclass(frozen=True)
class Generate:
    """Request an answer. Exactly one of `prompt`, `token_ids`, `messages` is given.

    The coordinator answers any number of Queued and Token and then exactly one Done with the same `request`.
    `request` is the client's own number, unique among its unfinished requests. The KV cache of a request
    of a `conversation` is kept when it ends: the next request of that conversation computes only the tokens
    after the longest common prefix. Names belong to a client, and its connection's end frees what was kept.

    `resume` are the answer's first tokens if the client has them already (from an engine that exited, for
    example): the answer continues after them. They count against `max_tokens`; the first Token has index
    len(resume).

    With a `rival`, a token id, every step's `runner_up` is that token, whatever its rank, and `margin` says
    by how much the best token exceeds it: for comparing two answers.

    A prompt that leaves fewer than `reserve` tokens of the context for the answer is refused; the refusal's
    stats have its length as `prompt_tokens`.

    `template`: a JSON object of what the chat template reads beside the messages, such as `tools`; or "".
    With `logprobs` of 0 or more each Token has its log-probability and those of so many best tokens.
    """

    request: int
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    conversation: str | None = None
    resume: tuple[int, ...] = ()
    rival: int = -1  # -1: the second best token of each step
    reserve: int = 1
    shaping: Shaping = field(default_factory=Shaping)
    logprobs: int = -1
    template: str = ""


@dataclass(frozen=True)
class Queued:
    """A request waits for KV cache or a slot. Sent when it is queued, and as its position changes."""

    request: int
    position: int  # 1: the next to be admitted


@dataclass(frozen=True)
class Token:
    """One new token. `text` can be shown now: whole characters, without anything that may turn out to be part
    of a stop string; it can be empty."""

    request: int
    index: int  # 0 for the first new token
    token: int
    text: str
    margin: float = 0.0  # the model's largest logit above that of `runner_up`, before any penalty or filter
    runner_up: int = -1  # the token of the second largest, -1 where there is none; or the Generate's `rival`
    logprob: float = 0.0  # natural, of the model's own logits; 0 unless the Generate wants `logprobs`
    top_tokens: tuple[int, ...] = ()  # the best tokens of this step, the best first
    top_logprobs: tuple[float, ...] = ()  # theirs


@dataclass(frozen=True)
class Done:
    """The one terminal message of a Generate or Score. `reason`: stop | length | cancelled | error."""

    request: int
    reason: str
    error: str = ""  # the cause and what to do, if reason is "error"
    text: str = ""  # the rest of the text that Token messages held back
    stats: Tree = field(default_factory=dict)
    usage: bool = False  # the request is at fault, not the engine


@dataclass(frozen=True)
class Cancel:
    """End this client's own request. Its Done follows, with reason "cancelled" unless it ended before."""

    request: int


@dataclass(frozen=True)
class Score:
    """Request log-probabilities of a given text; exactly one of `text`, `token_ids`. Answered by Scores
    blocks in order, each row once, then Done. `stepwise`: the first `prefill` tokens (at least 1) as a
    prefill, the rest one token at a time by the decode path. `full`: send the whole [rows, vocabulary]
    matrix too. `top`: send so many best tokens of each row."""

    request: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    stepwise: bool = False
    prefill: int = 1
    full: bool = False
    top: int = 0


@dataclass(frozen=True, eq=False)  # arrays have no one truth value to compare by
class Scores:
    """Rows [start, start+n) of a Score's answer. Row i predicts token i+1 and is natural-log
    probabilities; `tokens` holds the n tokens at those positions; `chosen[j]` is the log-probability
    that row start+j gives to the following token (the text's last row has none, so the last block's
    chosen is one shorter). `logprobs` is [n, vocabulary], or [0, 0] unless `full`. `top_tokens` and
    `top_logprobs` are [n, top], the best first."""

    request: int
    start: int
    tokens: I32Vector
    chosen: F32Vector
    logprobs: F32Matrix
    top_tokens: I32Matrix
    top_logprobs: F32Matrix


@dataclass(frozen=True)
class Tokenize:
    """Request token ids of exactly one of `text`, `messages` (with `template` as in Generate); or, of neither
    but `token_ids`, their text. Answered by Tokenized, or by a Done with the reason why not."""

    request: int
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    template: str = ""
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)  # arrays have no one truth value to compare by
class Tokenized:
    """A Tokenize's answer. `text`: of given ids, without special tokens; `pieces`: the bytes of each of them,
    the spelling of a special one; both empty where text or messages were given."""

    request: int
    ids: I32Vector
    text: str = ""
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Stats:
    """Request the engine's counters; answered by StatsReply. A key without the right `admin` gets those of
    its own requests."""

    request: int


@dataclass(frozen=True)
class StatsReply:
    request: int
    stats: Tree


@dataclass(frozen=True)
class ExpertActivity:
    """Request what happened to each expert; answered by ExpertActivityReply. It is counted from the first of
    these on, until a few seconds after the last. Over tcp it needs the right `admin`."""

    request: int


@dataclass(frozen=True, eq=False)
class ExpertActivityReply:
    """By layer and expert [L, E]: its resident tiles, of `tiles`; since the first request the steps that used
    it, its tiles that the device computed, and those of them that had to be fetched first."""

    request: int
    tiles: int
    resident: I32Matrix
    used: I32Matrix
    device: I32Matrix
    demanded: I32Matrix


@dataclass(frozen=True)
class SetPolicy:
    """Change the policy between two steps; answered by PolicyChanged (sent to every client, with
    `request` -1 for all other clients) or by Error. The coordinator forwards it to the supervisor, so that a
    restarted coordinator begins with this policy."""

    request: int
    policy: str
    options: Tree = field(default_factory=dict)  # option name -> text value, as in --set policy.option=value
    counted: bool = True  # False: the routing of its steps is not counted, as for a measurement


@dataclass(frozen=True)
class PolicyChanged:
    request: int
    policy: str
    exact: bool
    notes: tuple[str, ...] = ()  # options that the policy could not apply, with the reason


@dataclass(frozen=True)
class Calibrate:
    """Run the model over a text and write the statistics that policies plan with to a file on the engine's
    machine; exactly one of `text`, `token_ids`. Answered by any number of Calibrating, then by one
    Calibrated, or by a Done with the reason why not. Meanwhile running requests pause and new ones wait.

    At most 131072 `tokens`; what a client over tcp requests may take half an hour.

    Of a longer text the engine reads windows from all of it. A text that is too long for a message is sent
    as excerpts, one after the other."""

    request: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokens: int = 8192  # most tokens used; the rest of the text is left out
    starts: tuple[int, ...] = ()  # where the second and further excerpts begin, in characters or ids
    share: float = 1.0  # of the whole text that the excerpts are
    max_loss: float | None = None  # percent that approximations may add to the perplexity of held-out text


@dataclass(frozen=True)
class Calibrating:
    """Progress of a Calibrate: `done` of `total` of a stage, in tokens or the stage's own unit."""

    request: int
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Calibrated:
    """A Calibrate's answer. `summary`: the main results; see docs/calibration.md."""

    request: int
    path: str  # of the file, on the engine's machine
    summary: Tree


@dataclass(frozen=True)
class Heartbeat:
    """Sent both ways; a peer that is silent for too long counts as lost."""

    time: float = 0.0  # seconds, the sender's monotonic clock; never echoed


@dataclass(frozen=True)
class Error:
    """A message could not be served. `request` -1: not about a request; the connection has ended."""

    request: int
    text: str


# --- coordinator <-> worker, coordinator <-> prefetcher ------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A child is ready for work. Sent to the supervisor, and by workers and prefetcher to the coordinator.
    Peers refuse another `version` or `fingerprint`."""

    version: int
    role: str  # loader | coordinator | worker | prefetcher | text | door | gateway
    index: int
    incarnation: int
    pid: int
    fingerprint: str
    notes: tuple[str, ...] = ()  # for the user: cores that could not be pinned, for example


@dataclass(frozen=True, eq=False)  # arrays have no one truth value to compare by
class Work:
    """Compute some tiles of some experts of one layer, for the rows of `x` that route to them.

    items[i] = (expert, lo, hi): tiles [lo, hi). Item i acts on rows[offsets[i]:offsets[i+1]] of `x`
    with the routing weights at the same places of `weights`. `threshold` and `share`: the mask of a format
    whose gate and down lie by channel (`shm/mask.py`); others compute everything.
    """

    seq: int  # unique within the coordinator's incarnation
    layer: int
    items: I32Matrix  # [n, 3]
    offsets: I32Vector  # [n + 1]
    rows: I32Vector  # [offsets[-1]]
    weights: F32Vector  # [offsets[-1]]
    x: F32Matrix  # [R, hidden]
    threshold: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, eq=False)  # arrays have no one truth value to compare by
class Partial:
    """The weighted sum over a Work's items, a row for each row of its `x`; and what its mask has left out:
    the sum of |u| over rows and channels, of all and of those left out, and how many channels were read."""

    seq: int
    incarnation: int
    busy: float  # seconds the worker computed, without waiting and transport
    y: F32Matrix  # [R, hidden]
    mass: float = 0.0
    left: float = 0.0
    kept: int = 0  # of `channels`: of all tiles, those that any row keeps
    channels: int = 0


@dataclass(frozen=True)
class WorkFailed:
    """A worker refused a Work (its indices are out of range, for example); the worker continues."""

    seq: int
    incarnation: int
    text: str


@dataclass(frozen=True)
class Abandon:
    """The result of this Work is no longer needed: skip it if it has not been started."""

    seq: int


@dataclass(frozen=True)
class AttachRing:
    """Map this ring (`shm/ring.py`): Work may come through it from now on, and is answered through it."""

    name: str


@dataclass(frozen=True)
class AttachSlab:
    """Map this slab. kind "shm": `handle` is the segment's name; "cuda": a CUDA IPC memory handle. `flags`:
    the name of the segment with its landing flags (`shm/landing_flags.py`), if it has them."""

    kind: str
    handle: bytes
    device: int
    slots: int
    slot_bytes: int
    flags: str = ""


@dataclass(frozen=True)
class SlabAttached:
    """Sent again when its notes change. `error`: why the slab cannot be attached by this process. `flags`:
    landings are written to the slab's flags."""

    incarnation: int
    notes: tuple[str, ...] = ()
    error: str = ""
    flags: bool = False


@dataclass(frozen=True)
class PagesLocked:
    """How many of the store's first bytes the prefetcher has page-locked; sent whenever that has changed."""

    incarnation: int
    locked: int
    total: int


@dataclass(frozen=True)
class Fetch:
    """Copy tiles [lo, lo+len(slots)) of an expert to these slots, in this order."""

    id: int
    layer: int
    expert: int
    lo: int
    slots: tuple[int, ...]
    urgency: int  # 0 demanded now, 1 predicted, 2 placement in the background; smaller overtakes
    numbers: tuple[int, ...] = ()  # of each slot: what its landing writes to its flag; none: nothing does


@dataclass(frozen=True, eq=False)  # arrays have no one truth value to compare by
class Gather:
    """Copy the records of these channels of an expert, gathered one after the other, to these slots: as many
    records to each slot as a tile has channels. Answered as a Fetch, counted in channels."""

    id: int  # unique among Fetches too
    layer: int
    expert: int
    channels: I32Vector  # counted over the expert, ascending
    slots: tuple[int, ...]
    urgency: int  # as in Fetch


@dataclass(frozen=True)
class Fetched:
    """`landed` tiles of the order, or channels of a Gather, are in their slots. `final`: the last report of
    this order (all landed, or it was cancelled and what follows `landed` was not written)."""

    id: int
    incarnation: int
    landed: int
    final: bool
    seconds: float  # copying time of this order so far


@dataclass(frozen=True)
class CancelFetch:
    """Stop an order after the current tile or chunk of channels; its final Fetched follows."""

    id: int


@dataclass(frozen=True)
class DemandFetch:
    """The first `tiles` tiles of an order (channels of a Gather) are demanded now: it goes on as if it had
    just been sent with urgency 0, and ends with them, or with what is being copied."""

    id: int
    tiles: int


# --- coordinator <-> the door for tcp, coordinator <-> text process
# ------------------------------------------


@dataclass(frozen=True)
class RemoteClient:
    """The door to the coordinator, as the first message of a connection: the client that speaks on it."""

    account: str  # its public key, in Z85
    right: str  # use | tune | admin, each with those before it
    address: str  # of its machine, for the log


@dataclass(frozen=True)
class RemoteGone:
    """The door to the coordinator, as the last message of a connection: its client has ended it. The
    coordinator answers Error with `request` -1 when it has handled the messages before: ZeroMQ would drop
    those that a full socket has not read when its peer closes."""


@dataclass(frozen=True)
class Encode:
    """Request the token ids of texts, each encoded by itself, or of one conversation, rendered by the model's
    chat template with `template` as in Generate; or the text of `token_ids`. A `grammar` is checked."""

    texts: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] | None = None
    template: str = ""
    token_ids: tuple[int, ...] | None = None
    grammar: str = ""


@dataclass(frozen=True)
class Encoded:
    """The answer to an Encode: the ids of all texts, one after the other, and their lengths; or text and
    pieces of given ids, as in Tokenized; or why not."""

    ids: I32Vector
    lengths: tuple[int, ...] = ()
    error: str = ""
    text: str = ""
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Follow:
    """Request the tokens of `vocabulary` that an answer's grammar allows behind `tokens`, which are those
    since the last such request of this answer. With `grammar`, which is compiled first, they are the whole
    answer."""

    answer: int
    vocabulary: int
    tokens: tuple[int, ...] = ()
    grammar: str = ""


@dataclass(frozen=True)
class Allowed:
    """The answer to a Follow: a bit for each token that is allowed, the first one's the lowest of the first
    word; none where nothing may follow, or with an error."""

    mask: I32Vector
    error: str = ""


@dataclass(frozen=True)
class Unfollow:
    """An answer's grammar is followed no further."""

    answer: int


# --- supervisor <-> children ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Loader or coordinator to supervisor: `done` of `total` bytes of a stage of the start."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Failed:
    """A child cannot do its work and exits. `usage`: the user's input is at fault (exit code 2)."""

    role: str
    text: str
    usage: bool


@dataclass(frozen=True)
class Shutdown:
    reason: str = ""


@dataclass(frozen=True)
class WorkerDied:
    """Supervisor to coordinator: this incarnation of a worker or the prefetcher has exited. `crashed`: it
    failed or hung, and was not ended by a SIGKILL or SIGTERM from outside. `seq`: the Work that it was
    computing, -1 if none."""

    role: str  # worker | prefetcher
    index: int
    incarnation: int
    crashed: bool
    seq: int


@dataclass(frozen=True)
class WorkerUp:
    """Coordinator to supervisor: this incarnation of a worker or the prefetcher does its work. That is a
    little later than its Ready: a worker has imported its kernels, a prefetcher has mapped the slab."""

    role: str
    index: int
    incarnation: int


@dataclass(frozen=True)
class Hung:
    """Coordinator to supervisor: kill this incarnation, which has work and makes no progress."""

    role: str
    index: int
    incarnation: int


@dataclass(frozen=True)
class Needed:
    """Coordinator to supervisor: start this child, which the new policy needs and the first one did not."""

    role: str  # prefetcher


TAGS: dict[int, type] = {
    1: Hello,
    2: Welcome,
    3: Generate,
    4: Token,
    5: Done,
    6: Cancel,
    7: Score,
    8: Scores,
    9: Stats,
    10: StatsReply,
    11: SetPolicy,
    12: PolicyChanged,
    13: Heartbeat,
    14: Error,
    15: Queued,
    16: Calibrate,
    17: Calibrating,
    18: Calibrated,
    19: Tokenize,
    20: Tokenized,
    21: ExpertActivity,
    22: ExpertActivityReply,
    32: Ready,
    33: Work,
    34: Partial,
    35: WorkFailed,
    36: Abandon,
    37: AttachSlab,
    38: SlabAttached,
    39: Fetch,
    40: Fetched,
    41: CancelFetch,
    42: AttachRing,
    43: DemandFetch,
    44: Gather,
    45: PagesLocked,
    48: RemoteClient,
    49: Encode,
    50: Encoded,
    51: RemoteGone,
    52: Follow,
    53: Allowed,
    54: Unfollow,
    64: Progress,
    65: Failed,
    66: Shutdown,
    67: WorkerDied,
    68: WorkerUp,
    69: Needed,
    70: Hung,
}
VERSION = 7
SAY_HELLO = "say Hello first"  # the text of the Error that answers a peer without a Welcome
