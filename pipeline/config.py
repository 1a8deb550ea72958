"""The engine's configuration: frozen dataclasses; the command line's defaults come from them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, cast

from shm.layout import Part

DEFAULT_CONTEXT = 8192  # tokens, where the model would take more
KV_CONTEXTS = 4  # full contexts that the KV cache holds, where they fit
DEFAULT_CACHE = 0.25  # share of all expert tiles, where it fits; a GPU takes as many as it can hold

# Sizes that the memory plan and the code it plans for have in common.
KV_BLOCK = 64  # tokens of a block of the KV cache; as in workers/kernels/c/kernels.h
KV_RUN = 128  # numbers that share a scale, in a KV cache of int8
SNAPSHOTS = 2  # of recurrent states that are kept, for each sequence that has present and pending ones
STATE_TOKENS = 2048  # of the KV cache's tokens, for each sequence whose recurrent states it has room for
DRAFT_TOKENS = 1024  # of a sequence that a layer which drafts sees at once
DRAFT_SEQUENCES = 8  # of so many tokens, that its keys and values have room for
DRAFT_RECENT = 64  # tokens of a text with which such a sequence begins, at most
EXPANDED_KV_BYTES = (
    1 << 27
)  # keys and values that latent attention expands at a time; scores of a generic family
SCORE_BYTES = 1 << 24  # scores of attention that a GPU computes at a time, where it has no flash attention
GRAPH_BYTES = 1 << 28  # of GPU memory, for CUDA graphs and what they allocate
BACKGROUND_ORDERS = 64  # most background fetches under way: more would only fill the prefetcher's socket

DeviceName = Literal["auto", "cpu", "cuda"]
# Formats of expert tiles, see shm/layout.py: those of files keep a quantized model without loss; of those in
# shm/floe.py single channels can be left out.
OwnName = Literal["f32", "bf16", "int8", "int4", "int4-g128", "int2"]
FileName = Literal["q4_0", "q8_0", "mxfp4", "nvfp4", "fp8", "int4-f16", "int4-f16-g32", "int4-f16-g128"]
DenseName = Literal[OwnName, FileName]
FloeName = Literal[
    "floe", "floe-int8", "floe-int4", "floe-u4", "floe-u4-int8", "floe-u4-int4",
    "floe-u8", "floe-u8-int8", "floe-u8-int4",
]  # fmt: skip
FormatName = Literal[DenseName, FloeName]
ExchangeName = Literal["shm", "zmq"]
GraphsName = Literal["auto", "off"]
SpeculateName = Literal["on", "off"]
# own: bf16, and the matrices that the file has quantized as they are there.
BackboneDType = Literal["f32", "bf16", "fp8", "int8", "int4", "own"]
KvDType = Literal["f32", "bf16", "int8"]


@dataclass(frozen=True)
class LanePlan:
    """How experts are divided among machines (`shm/layout.py`), and which lanes this one holds. The bits of a
    layer depend on `bounds`, `pieces` and `rows` alone, never on who computes."""

    bounds: tuple[int, ...]
    held: tuple[int, ...]  # a coordinator's: its own, then the copies that it has of others'
    pieces: int  # into so many runs a lane is cut for its holder's workers
    rows: int = 256  # at most, of one piece of a wide batch: its way and its products overlap with the next

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.pieces < 1 or self.rows < 1:
            raise ValueError(f"lanes need pieces and rows, not {self.pieces} and {self.rows}")
        Part(self.bounds, self.held)

    @classmethod
    def from_map(cls, plain: dict[str, Any] | None) -> Self | None:
        """Return the plan of `asdict`; None of None."""
        if plain is None:
            return None
        return cls(tuple(plain["bounds"]), tuple(plain["held"]), plain["pieces"], plain["rows"])

    @property
    def copies(self) -> tuple[int, ...]:
        """Returns the lanes that a coordinator computes only where their machines do not."""
        return self.held[1:]

    @property
    def part(self) -> Part:
        return Part(self.bounds, self.held)


@dataclass(frozen=True)
class Machine:
    """Another machine's expert host, where its coordinator reaches it."""

    name: str
    endpoint: str  # tcp://ADDRESS:PORT
    key: str  # its public CURVE key, 40 characters
    lanes: tuple[int, ...]  # its own first, then those that it has as replicas
    why: str = ""  # it has no endpoint


@dataclass(frozen=True)
class MachineList:
    """All that hold lanes beside the coordinator's own machine, and the coordinator's own CURVE keys, of
    which the expert hosts know the public one. A lane that several hold is asked of the first that
    answers."""

    machines: tuple[Machine, ...]
    public_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def from_map(cls, plain: dict[str, Any] | None) -> Self | None:
        """Return the list of `asdict`; None of None."""
        if plain is None:
            return None
        machines = (Machine(**one | {"lanes": tuple(one["lanes"])}) for one in plain["machines"])
        return cls(tuple(machines), plain["public_key"], plain["secret_key"])


@dataclass(frozen=True)
class Card:
    """A device that `--device` names: a GPU by its number, or an emulated one by its memory."""

    number: int
    memory: int | None = None  # bytes of an emulated one

    def __str__(self) -> str:
        return f"cuda:{self.number}" if self.memory is None else f"cpu:{self.memory / 1e9:g}GB"


@dataclass(frozen=True)
class EngineConfig:
    """All options of one engine. None: chosen, by pipeline/memory/plan.py where memory decides."""

    model: Path | None = None  # a folder, or the path `shape:NAME/LAYERS`; None: the embedded model
    name: str | None = None  # None: made from the supervisor's process id
    # auto, cpu or cuda; or devices that divide the layers: cuda:NUMBER,... or cpu:BYTES,...
    device: str = "auto"
    policy: str | None = None  # None: all-host without a GPU, tandem with one
    policy_options: dict[str, str] = field(default_factory=dict)
    format: FormatName | None = None  # of the experts; None: the file's own, or the most exact that fits
    backbone_dtype: BackboneDType | None = None  # of all the rest; None: bf16, or own for a quantized file
    kv_dtype: KvDType | None = None  # of the KV cache; None: f32 for a backbone in f32, else bf16
    expert_cache: float | None = None  # share of all expert tiles on the device, 0..1; None: as many as fit
    tile: int | None = None  # channels; None: chosen from the experts' shape
    workers: int | None = None  # 0: the coordinator computes; None: one for each core, at most 16
    context: int | None = None  # tokens; None: the model's, at most DEFAULT_CONTEXT, or as many as fit
    kv_tokens: int | None = None  # tokens that the KV cache holds; None: up to KV_CONTEXTS contexts
    max_sequences: int = 16  # sequences that are decoded together
    chunk: int | None = None  # prefill tokens of one step; None: measured at start
    # emulation: pace of copies to the device, or to each of several, GB/s (1e9 bytes)
    link_gbps: float | tuple[float, ...] | None = None
    host_slowdown: float = 1.0  # emulation: factor on the workers' computing time
    costs: Path | None = None  # use these instead of measuring
    record: Path | None = None  # a new file for the trace of every step's routing; absolute
    # bytes of experts in memory, the others stay on disk; None: all of them, or as many as fit
    host_memory: int | None = None
    seed: int = 0  # of the preset `random` and of requests that give none
    exchange: ExchangeName = "shm"  # of Work with the workers
    graphs: GraphsName = "auto"  # CUDA graphs of decode steps
    # guesses of next tokens that a step computes too: on: as many as gain; or so many where there are any
    speculate: SpeculateName | int = "on"
    keep_store: bool = False
    http: str | None = None  # HOST:PORT of the gateway, for clients over HTTP; None: there is no gateway
    http_keys: Path | None = None  # file of its API keys; None: without keys, for this machine alone
    allowed_origins: tuple[str, ...] = ()  # of pages of other sites that may send requests there; "*": any
    served_model_name: tuple[str, ...] = ()  # over HTTP, the model's only names; (): every name is one
    lanes: LanePlan | None = None  # None: this machine has all of every expert

    @classmethod
    def from_map(cls, plain: dict[str, Any]) -> Self:
        """The configuration from a child's map: `dataclasses.asdict` with paths as text."""
        files = ("model", "costs", "record", "http_keys")
        paths = {name: Path(plain[name]) for name in files if plain[name] is not None}
        names = ("allowed_origins", "served_model_name", "link_gbps", "stages")
        lists = {name: tuple(plain[name]) for name in names if isinstance(plain.get(name), list)}
        return cls(**(plain | paths | lists | {"lanes": _lanes_of(plain["lanes"])}))

    @property
    def kind(self) -> DeviceName:
        """Of the device or devices."""
        return cast(DeviceName, self.device.partition(":")[0])

    @property
    def cards(self) -> tuple[Card, ...]:
        """The devices that are named one by one, in the order of the layers; (): there is one, as it is."""
        if ":" not in self.device:
            return ()
        sizes = [int(word.partition(":")[2]) for word in self.device.split(",")]
        if self.kind == "cuda":
            return tuple(Card(number) for number in sizes)
        return tuple(Card(number, memory) for number, memory in enumerate(sizes))

    def link_of(self, device: int) -> float | None:
        """The emulated pace of a device's link, GB/s; None: as it is."""
        return self.link_gbps[device] if isinstance(self.link_gbps, tuple) else self.link_gbps

    @property
    def emulation(self) -> str:
        """Describes how this engine is slowed down to stand in for another machine; empty where it is not."""
        paces = []
        if isinstance(self.link_gbps, tuple):
            paces.append(f"links paced to {', '.join(f'{rate:g}' for rate in self.link_gbps)} GB/s")
        elif self.link_gbps is not None:
            paces.append(f"link paced to {self.link_gbps:g} GB/s")
        if self.cards and self.kind == "cpu":
            paces.append(f"devices {', '.join(map(str, self.cards))}")
        if self.host_slowdown != 1.0:
            paces.append(f"host slowed by {self.host_slowdown:g}")
        return ", ".join(paces)


def _lanes_of(plain: LanePlan | dict[str, Any] | None) -> LanePlan | None:
    return plain if isinstance(plain, LanePlan) else LanePlan.from_map(plain)


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """A configuration with every choice made by the memory plan; an engine's processes get it."""

    format: FormatName = "bf16"
    backbone_dtype: BackboneDType = "bf16"
    expert_cache: float = DEFAULT_CACHE
    staging: int | None = None  # slots of each slab beside the cache's; None: the fewest
    stages: tuple[int, ...] = ()  # layers with experts on each device; (): one has all


@dataclass(frozen=True)
class WorkerCores:
    """The expert workers in the order of their NUMA nodes: how many cores each computes on, and the number of
    nodes (1 also where the order is arbitrary)."""

    cores: tuple[int, ...]
    nodes: int = 1

    @classmethod
    def equal(cls, number: int) -> Self:
        """Return so many workers on one core each."""
        return cls((1,) * number)

    def __len__(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class CoordinatorConfig:
    """Describes one engine to its coordinator, to which the supervisor gives this at the start."""

    engine: str  # its name
    runtime: Path
    generation: int
    key: bytes  # the engine's children prove their identity with it
    control: str  # name of the control segment
    store: str
    fingerprint: str
    model: Path
    cache: Path  # folder of files that are kept between starts
    workers: WorkerCores
    slab: bool  # the first policy keeps experts on the device, and the prefetcher is being started
    options: ResolvedConfig
    suspects: dict[int, int] = field(default_factory=dict)  # crashes at which a request was being computed
    machines: MachineList | None = None  # with `options.lanes`

    @classmethod
    def from_map(cls, config: dict[str, Any]) -> Self:
        """Return the configuration from the supervisor's map."""
        names = {one.name for one in fields(cls)}
        return cls(
            **{name: value for name, value in config.items() if name in names}
            | {name: Path(config[name]) for name in ("runtime", "model")}
            | {"cache": Path(config["cache_dir"]), "suspects": dict(config["suspects"])}
            | {"workers": WorkerCores(tuple(config["workers"]), config["nodes"])}
            | {"options": ResolvedConfig.from_map(config["config"])}
            | {"machines": MachineList.from_map(config.get("machines"))}
        )
