"""The expected decode speed of a model that need not be there: the bytes that a token reads, by the rates at
which this machine's kernels read them, and the time of a step beside its reads.

All of it is measured now: what all cores together read from memory; what the expert kernel of each format
reaches of it, with the model's own shape and one worker on each core; what the backbone's products reach; and
one layer's rest (attention, routing, messages) by a request to the embedded model, whose weights are small.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from launch.command_line.options import Options
from launch.doctor import models
from launch.doctor.bandwidth import buffer_size, busy, open_buffer, run_children
from launch.doctor.proof import prove
from launch.processes.cores import Cores
from launch.processes.kernel_choice import choice_of, kept_or_measured
from launch.processes.trials import TrialFailed
from launch.terminal.format import percent, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig, FormatName
from pipeline.memory.needs import Needs, backbone_tensors, quantized_bytes
from pipeline.models.registry import expert_shape
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.user_folders import user_folder
from shm.layout import FORMATS, BlockFormat, FloeFormat, StoreLayout, format_named
from shm.segment import available_memory, byte_size

CHILD = "launch.doctor.kernel_rates"
SECONDS = 0.4  # of each measurement
CONTEXT = 1000  # tokens that an expected token attends to
SPARSE = PolicyRequest("floe-host")  # of which floe formats are expected, where no sparsity is asked for
QUANTILES = (0.1, 0.5, 0.9)  # of measured rates: the slow, the usual and the fast ones
MARGIN = 0.2  # of the range at least: how evenly a token's experts divide over the workers is not measured


@dataclass(frozen=True)
class Spread:
    """Bytes a second: slow, usual, fast."""

    slow: float
    usual: float
    fast: float

    @classmethod
    def of(cls, together: Sequence[Sequence[float]]) -> Spread:
        """`together`: the rates of each process that computed at the same time."""
        return cls(*np.sum([np.quantile(rates, QUANTILES) for rates in together], axis=0).tolist())


@dataclass(frozen=True)
class Speeds:
    """What was measured here. `experts`: by format; `layer`: seconds of a layer beside its reads."""

    memory: float  # bytes a second, all cores: the fastest of all readings, so that no share exceeds it
    experts: Mapping[str, Spread]
    backbone: Spread
    layer: float
    load: float  # load average just before
    cores: int  # that computed

    def to_map(self) -> dict[str, Any]:
        return {
            "memory_gbps": self.memory / 1e9,
            "expert_kernels_gbps": {name: spread.usual / 1e9 for name, spread in self.experts.items()},
            "backbone_gbps": self.backbone.usual / 1e9,
            "layer_overhead_s": self.layer,
            "load_average": self.load,
            "cores": self.cores,
        }


@dataclass(frozen=True)
class Bytes:
    """What one token reads."""

    experts: int
    backbone: int
    kv: int

    @property
    def total(self) -> int:
        return self.experts + self.backbone + self.kv


@dataclass(frozen=True)
class Forecast:
    """Tokens a second of one request. `limit`: where all bytes were read at the memory's full bandwidth."""

    reads: Bytes
    limit: float
    slow: float
    usual: float
    fast: float

    def to_map(self) -> dict[str, Any]:
        return {
            "tok_s": self.usual,
            "tok_s_range": [self.slow, self.fast],
            "memory_limit_tok_s": self.limit,
            "share_of_limit": self.usual / self.limit,
            "bytes_per_token": {"experts": self.reads.experts, "backbone": self.reads.backbone}
            | {"kv": self.reads.kv},
        }


async def measure_speeds(
    source: ModelSource, asked: EngineConfig, names: Sequence[str], options: Options, interrupts: Interrupts
) -> Speeds:
    """Takes about ten seconds. `names`: the formats. Raises TrialFailed."""
    notice("measuring how fast this machine would run it: about ten seconds")
    here, load = Cores.here(), os.getloadavg()[0]
    cores = [core for cpus in here.for_workers(here.default_workers()) for core in cpus.cores]
    cache, available = models.last_cache(), available_memory()
    shapes = [(name, astuple(expert_shape(source.config, asked.tile, format_named(name)))) for name in names]
    plain = not isinstance(FORMATS[asked.backbone_dtype], BlockFormat)
    size = buffer_size(cache, available)
    kernels = choice_of(await kept_or_measured(user_folder("CACHE"), lambda: None))
    with open_buffer(size) as fd:
        base: dict[str, Any] = {"fd": fd, "size": size, "seconds": SECONDS, "kernels": kernels.to_map()}
        part = size // len(cores) // 4096 * 4096
        parts = [{"cores": [core], "lo": i * part, "hi": (i + 1) * part} for i, core in enumerate(cores)]
        backbone_format = [] if plain else [(asked.backbone_dtype, shapes[0][1])]
        base |= {"experts": [*shapes, *backbone_format], "matrix": None, "left_out": left_out(asked)}
        kinds = zip(*await run_children(CHILD, [base | each for each in parts], fd), strict=True)
        reads, *spreads = [Spread.of(together) for together in kinds]
        if plain:
            hidden = expert_shape(source.config, asked.tile, format_named(names[0])).hidden
            base |= {"experts": [], "matrix": (asked.backbone_dtype, hidden, len(cores))}
            config = base | {"cores": [], "lo": 0, "hi": size}
            spreads.append(Spread.of([(await run_children(CHILD, [config], fd))[0][-1]]))
    proof = await prove(options, interrupts, "cpu")
    if proof.failure:
        raise TrialFailed(proof.failure)
    small = models.embedded()
    layer = max(0.0, 1 / proof.rate - small.token / reads.usual) / small.layers
    memory = max(spread.fast for spread in (reads, *spreads))
    return Speeds(memory, dict(zip(names, spreads, strict=False)), spreads[-1], layer, load, len(cores))


def left_out(asked: EngineConfig) -> float:
    """The share of an expert's channels that a token leaves out in a floe format: the policy's, where it has
    a number, else that of SPARSE."""
    if asked.policy is not None:
        wished = make_policy(PolicyRequest(asked.policy, asked.policy_options), 0).sparsity.wished
        if wished is not None and (wished or "sparsity" in asked.policy_options):
            return wished
    return make_policy(SPARSE, 0).sparsity.wished or 0.0


def bytes_read(source: ModelSource, asked: EngineConfig, needs: Needs) -> Bytes:
    """Of one token after CONTEXT others, in this format; of a floe format without what is left out."""
    tile_format = format_named(needs.format)
    shape = expert_shape(source.config, asked.tile, tile_format)
    layout = StoreLayout(shape, tile_format)
    tensors = list(backbone_tensors(source, needs.spec))
    backbone = needs.backbone
    if not needs.spec.tied_embeddings or quantized_bytes(tensors, needs.spec, asked):
        backbone -= needs.spec.vocabulary * needs.spec.hidden * (4 if asked.backbone_dtype == "f32" else 2)
    expert = layout.expert_bytes
    if isinstance(tile_format, FloeFormat):
        expert -= round(left_out(asked) * layout.tile_bytes * shape.tiles)
    return Bytes(shape.layers * needs.spec.top_k * expert, backbone, CONTEXT * needs.kv_token)


def forecast(reads: Bytes, needs: Needs, speeds: Speeds) -> Forecast:
    rest = needs.spec.layers * speeds.layer + reads.kv / speeds.memory
    experts, backbone = speeds.experts[needs.format], speeds.backbone
    tok_s = [
        1 / (reads.experts / of_experts + reads.backbone / of_backbone + rest)
        for of_experts, of_backbone in zip(astuple(experts), astuple(backbone), strict=True)
    ]
    slow, usual, fast = tok_s
    limit = speeds.memory / reads.total
    slow, fast = min(slow, usual * (1 - MARGIN)), max(fast, usual * (1 + MARGIN))
    return Forecast(reads, limit, slow, usual, min(fast, limit))


def explain(forecasts: Mapping[FormatName, Forecast], speeds: Speeds, asked: EngineConfig) -> list[str]:
    """How the expected speeds were found, in lines."""
    dtype = asked.backbone_dtype
    kernels = ", ".join(
        f"{name} {percent(spread.usual / speeds.memory)}" for name, spread in speeds.experts.items()
    )
    first = next(iter(forecasts.values()))
    sparse = any(isinstance(format_named(name), FloeFormat) for name in forecasts)
    share = left_out(asked)
    masked = f" In floe formats it leaves out {percent(share)} of an expert's channels (floe-host, --set"
    whole = f"{masked} floe-host.sparsity=X)." if sparse else ""
    lines = [finding.found + "; " + finding.means for finding in busy(speeds.load, speeds.cores)]
    return [
        *lines,
        f"tok/s: expected of one request after {CONTEXT} tokens, with --policy all-host. A token"
        f" reads its experts, {byte_size(first.reads.backbone)} of backbone in {dtype} and"
        f" {byte_size(first.reads.kv)} of KV cache.{whole}",
        f"Measured here just now: all cores read up to {rate(speeds.memory)}; the expert kernels reach"
        f" {kernels} of that, the backbone {percent(speeds.backbone.usual / speeds.memory)}; the rest of a"
        f" layer takes {1e3 * speeds.layer:.2g} ms.",
    ]
