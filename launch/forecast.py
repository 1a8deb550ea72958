"""Expected speeds. `doctor --model` asks for them by the bytes that a token reads and by measured rates,
`advise` by a replay of a model's routing with costs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launch.errors import WrongUsage
from launch.profile import PhaseProfile
from pipeline.arrays import PHASES, Phase
from pipeline.calibration.file import NAME, load
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import CalibrationError, PolicyError
from pipeline.experts.disk_use import misses
from pipeline.memory.needs import Needs, needs, needs_all, plain_bytes, quantized_bytes
from pipeline.models.facts import expert_shape
from pipeline.models.shapes import is_shape
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs, Rates, derived
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, Policy, PolicyRequest
from pipeline.replay.machine import DividedText
from pipeline.traces.recorder import DEPTH
from pipeline.traces.synthetic import EMBEDDED, PROFILES, SyntheticText
from pipeline.traces.trace import Header
from protocol.program import user_folder
from shm.layout import FloeFormat, StoreLayout, format_named

log = logging.getLogger("tandem")

CONTEXT = 1000  # tokens that an expected token attends to
MARGIN = 0.2  # of the range: how evenly a token's experts divide over the workers is not measured
WARM = 40  # tokens of decode before those that count: caches fill, and policies learn
COUNTED = 32  # tokens of decode that count; with 48 no estimate of 52 was more than 1 % away
HISTORY = 1000  # tokens from which the popularity of experts is known
HIDDEN = ("setting", "notes")  # from `Estimate.to_map`
DECISIONS = ("probes", "gate", "plan", "ahead", "predict", "channels_ahead", "after")


# --- what a model's parts weigh -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A model in one format, from its config alone; bytes unless noted otherwise."""

    needs: Needs
    header: Header  # as a trace of the model in this format would have it
    expert: int  # with its heads, where the format has them
    expert_weights: int  # numbers
    other: int  # of a layer, without its routed experts
    other_weights: int  # numbers
    head: int  # read once a step
    kv_token: int  # of one token in one layer

    @property
    def format(self) -> FormatName:
        return self.needs.format

    @property
    def token(self) -> int:
        """Bytes of the experts that a token reads."""
        return self.header.shape.layers * self.header.shape.top_k * self.expert

    @property
    def tile(self) -> float:
        """Bytes that are read for a tile; the header has those that are moved for it."""
        return self.expert / self.header.shape.tiles


def sizes_of(source: ModelSource, config: EngineConfig, format: FormatName) -> Sizes:
    """Returns a model's sizes with the config's device and workers. Raises as `needs`."""
    known = needs(source, config, format)
    facts, tile_format = known.facts, format_named(format)
    shape = expert_shape(source.config, config.tile, tile_format)
    layout = StoreLayout(shape, tile_format)
    table, number = facts.vocabulary * facts.hidden, plain_bytes(config)
    # a token reads the head's table, and of the embeddings' a row; a tied table is one tensor
    once = facts.tied_embeddings and not quantized_bytes(facts, config)
    read = known.backbone - (0 if once else table * number)
    numbers = facts.matrix_numbers + facts.other_numbers - (0 if facts.tied_embeddings else table)
    weights = max(0, numbers - table) // facts.layers
    head = round(read * table / max(numbers, 1))
    header = Header(
        model=source.name,
        fingerprint=source.fingerprint("calibration", 0),
        store=source.fingerprint(format, shape.tile),
        shape=ModelShape(len(facts.moe_layers), shape.experts, shape.tiles, facts.top_k),
        tile_bytes=layout.tile_bytes,
        router=facts.router,
        depth=DEPTH,
    )
    return Sizes(
        needs=known,
        header=header,
        expert=layout.expert_bytes,
        expert_weights=shape.math.matrices * facts.hidden * facts.intermediate,
        other=max(0, read - head) // facts.layers,
        other_weights=weights,
        head=head,
        kv_token=known.kv_token // facts.layers,
    )


# --- routing of a model that was not run ------------------------------------------------------------------


def drawn(header: Header, prompt: int, chunk: int, seed: int, batch: int = 1) -> DividedText:
    """Returns routing of a model that was not run, of so many sequences at once."""
    name = header.model.removeprefix("shape:").partition("/")[0] if is_shape(header.model) else ""
    text = SyntheticText(header, PROFILES.get(name, EMBEDDED), seed)
    counts = text.counts(HISTORY)
    warm = text.steps(0, 1, WARM, batch)
    steps = [*warm, *text.steps(prompt, chunk, COUNTED, batch)]
    like = "with the locality that was published for it" if name in PROFILES else "like the embedded model's"
    words = f"synthetic routing, {like}" + f", {batch} requests at once" * (batch > 1)
    return DividedText(steps, len(warm), counts, words)


# --- by bytes and rates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of all cores. `experts`: by format; `layer`: seconds of a layer beside its reads."""

    memory: float  # the fastest of all readings, so that no share exceeds it
    experts: Mapping[str, float]
    backbone: float
    layer: float
    load: float  # load average just before
    cores: int  # that computed

    def to_map(self) -> dict[str, Any]:
        return {
            "memory_gbps": self.memory / 1e9,
            "expert_kernels_gbps": {name: pace / 1e9 for name, pace in self.experts.items()},
            "backbone_gbps": self.backbone / 1e9,
            "layer_overhead_s": self.layer,
            "load_average": self.load,
            "cores": self.cores,
        }


@dataclass(frozen=True)
class Expected:
    """Tokens a second of one request on the host alone, and the bytes that one token reads."""

    experts: int
    backbone: int
    kv: int
    limit: float  # where all bytes were read at the memory's full bandwidth
    usual: float

    @property
    def range(self) -> tuple[float, float]:
        return self.usual * (1 - MARGIN), min(self.usual * (1 + MARGIN), self.limit)

    def to_map(self) -> dict[str, Any]:
        return {
            "tok_s": self.usual,
            "tok_s_range": list(self.range),
            "memory_limit_tok_s": self.limit,
            "share_of_limit": self.usual / self.limit,
            "bytes_per_token": {"experts": self.experts, "backbone": self.backbone, "kv": self.kv},
        }


def by_rates(sizes: Sizes, speeds: Speeds, left_out: float) -> Expected:
    """Returns the speed after CONTEXT other tokens. `left_out`: the share of an expert's channels that a
    token leaves out in a floe format."""
    facts, shape, tile_format = sizes.needs.facts, sizes.header.shape, format_named(sizes.format)
    expert = sizes.expert
    if isinstance(tile_format, FloeFormat):
        expert -= round(left_out * sizes.header.tile_bytes * shape.tiles)
    experts = shape.layers * shape.top_k * expert
    backbone, kv = facts.layers * sizes.other + sizes.head, CONTEXT * sizes.needs.kv_token
    kv += 2 * 4 * facts.state_numbers  # read and written
    rest = facts.layers * speeds.layer + kv / speeds.memory
    seconds = experts / speeds.experts[sizes.format] + backbone / speeds.backbone + rest
    limit = speeds.memory / (experts + backbone + kv)
    return Expected(experts, backbone, kv, limit, min(1 / seconds, limit))


@dataclass(frozen=True)
class OnDisk:
    """What a token reads from a disk where only some experts are in memory."""

    experts: float
    of: int  # experts that it uses
    bytes: float
    routing: str  # in words: on which this was counted

    @property
    def hit_rate(self) -> float:
        return 1 - self.experts / self.of


def on_disk(sizes: Sizes, text: DividedText, phase: Phase = "decode", copied: int = 0) -> OnDisk:
    """Returns what a token of this routing reads, without reading ahead. `copied`: experts that a device has
    whole, which need no memory."""
    needs, shape = sizes.needs, sizes.header.shape
    capacity = int(needs.store / needs.whole * shape.layers * shape.experts) + copied
    share = text.counts * (shape.top_k / np.maximum(text.counts.sum(axis=1, keepdims=True), 1))
    used = ([layer.router_routing.active.experts for layer in step.layers] for step in text.steps)
    rows = [len(step.sequences) * (step.phase == phase) for step in text.steps]
    warm = text.begin if any(rows[text.begin :]) else 0  # else no prompt is among the steps that count
    experts = misses(used, [0] * warm + rows[warm:], share, capacity)
    one = needs.whole / (needs.facts.stored_layers * shape.experts)
    return OnDisk(experts, shape.layers * shape.top_k, experts * one, text.words)


def with_disk(expected: Expected, on_disk: OnDisk, rate: float) -> Expected:
    """Returns the speed with a disk of so many bytes a second, which reads while nothing else of the token
    is done; and the limit where it reads meanwhile."""
    disk = on_disk.bytes / rate
    usual, limit = 1 / (1 / expected.usual + disk), 1 / max(1 / expected.limit, disk)
    return replace(expected, usual=usual, limit=max(usual, limit))


# --- by a replay --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """The costs of a model's step on a machine in one format."""

    costs: Costs  # per tile
    rest: float  # seconds of a step outside its layers
    disk: float = 0.0  # bytes a second, of experts that are not in memory


def costs_there(rates: Rates, sizes: Sizes, context: int) -> Costs:
    """Returns the costs of a tile on a machine of these rates, for tokens that attend to so many others."""
    other = sizes.other + context * sizes.kv_token
    costs = derived(rates, sizes.expert, sizes.expert_weights, other, sizes.other_weights)
    costs = replace(costs, link=costs.link * sizes.header.tile_bytes / sizes.tile)
    return costs.for_tiles(sizes.header.shape.tiles)


@dataclass(frozen=True)
class Setting:
    """A preset with an expert cache, in one format."""

    policy: PolicyRequest
    format: FormatName
    capacity: int  # tiles
    share: float  # of all tiles
    host_memory: int | None = None  # bytes of experts in memory, where the others are on disk


@dataclass(frozen=True)
class Estimate:
    """The speed that a setting would reach. Rates and shares are of decode."""

    setting: Setting
    exact: bool
    tok_s: float
    first_token_s: float | None  # of a prompt alone; None where the routing has no prompt
    hit_rate: float
    host_share: float  # of the tiles
    moved: float  # bytes a token
    read: float  # bytes a token, from disk
    wait_link: float  # share of the time
    wait_host: float
    wait_disk: float
    planning: float  # share of the time: what the policy's decisions take in this process
    fidelity: dict[str, float | None]
    notes: tuple[str, ...]

    def to_map(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in HIDDEN}
        setting = self.setting
        return {
            "policy": setting.policy.name,
            "options": setting.policy.options,
            "format": setting.format,
            "expert_cache": setting.share,
            "cache_tiles": setting.capacity,
            "host_memory": setting.host_memory,
            "workers": None,  # the default
            **plain,
            "notes": list(self.notes),
        }


def by_replay(
    setting: Setting, sizes: Sizes, priced: Priced, text: DividedText, prompt: int, seed: int
) -> Estimate:
    """Returns the speed of a setting on this routing. `prompt`: tokens of the prompt whose first token is
    timed. Raises PolicyError where the preset lacks an input or needs every expert in memory, TraceError
    where the routing lacks one, PlanError."""
    policy, size = make_policy(setting.policy, seed), sizes.header.tile_bytes
    if sizes.needs.partial and (why := needs_all(policy, format_named(sizes.format))):
        raise PolicyError(why)
    taken, steps = timed(policy), Counter(step.phase for step in text.steps)
    outcome = text.replay(sizes.header, policy, priced.costs, setting.capacity)
    decode, read = (PhaseProfile(outcome.measured[phase], size) for phase in ("decode", "prefill"))
    if not read.rows and outcome.warmed:  # no prompt among the steps that count
        read = PhaseProfile(outcome.warmed["prefill"], size)
    beside = {phase: priced.rest + spent / max(steps[phase], 1) for phase, spent in taken.items()}
    reads = _from_disk(sizes, text, outcome.copied)
    disk = {phase: size and size / priced.disk for phase, size in reads.items()}  # seconds a token
    whole = decode.seconds + decode.steps * beside["decode"] + decode.rows * disk["decode"]
    return Estimate(
        setting=setting,
        exact=outcome.exact,
        tok_s=decode.rows / whole,
        first_token_s=(
            ((read.seconds + read.steps * beside["prefill"]) / read.rows + disk["prefill"]) * prompt
            if read.rows
            else None
        ),
        hit_rate=decode.hit_rate or 0.0,
        host_share=decode.host_share,
        moved=decode.copied / max(decode.rows, 1),
        read=reads["decode"],
        wait_link=decode.causes["link"] / whole,
        wait_host=decode.causes["workers"] / whole,
        wait_disk=decode.rows * disk["decode"] / whole,
        planning=decode.steps * (beside["decode"] - priced.rest) / whole,
        fidelity={} if outcome.exact else decode.fidelity,
        notes=tuple(outcome.notes),
    )


def _from_disk(sizes: Sizes, text: DividedText, copied: int) -> dict[Phase, float]:
    """Returns the bytes that a token reads from a disk; as `with_disk`, while nothing else is done."""
    if not sizes.needs.partial:
        return dict.fromkeys(PHASES, 0.0)
    return {phase: on_disk(sizes, text, phase, copied).bytes for phase in PHASES}


def timed(policy: Policy) -> dict[Phase, float]:
    """Returns the seconds of this process that the policy's decisions take from now on, by phase: an engine
    waits for them in every layer, and no cost has them."""
    taken: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def called(*given: Any) -> object:
            began = time.thread_time()
            answer = call(*given)
            taken[given[-1].phase] += time.thread_time() - began
            return answer

        return called

    for name in DECISIONS:
        setattr(policy, name, counted(getattr(policy, name)))
    return taken


def calibration_of(header: Header, first: bool) -> Calibration | None:
    """Returns a recorded model's calibration on this machine, as far as a replay can use it, or None.
    `first`: whether the trace has probes for the gate of the next token's first layer. A damaged file counts
    as none, with a warning. Raises WrongUsage for a file of another shape."""
    path = user_folder("CACHE") / header.fingerprint / NAME
    if not path.exists():
        return None
    try:
        calibration = load(path)
    except CalibrationError as e:
        log.warning(f"warning: {e}")
        return None
    if calibration.decode_counts.shape != (header.shape.layers, header.shape.experts):
        raise WrongUsage(f"{path} calibrates a model of another shape than the recorded one")
    # traces hold no probe of the MLPs
    calibration = replace(calibration, mlp_inner=None, mlp_outer=None, mlp_history=None, mlp_accuracy=None)
    return calibration if first else replace(calibration, first_gate=None)
