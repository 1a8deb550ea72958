"""Measures what an expected speed rests on (`launch/forecast.py`): the rates at which this machine's kernels
read a model that need not be there, and the time of a layer beside its reads.

That is what all cores together read from memory; what the expert kernel of each format reaches of it, with
the model's own shape and one worker on each core; what the backbone's products reach; and one layer's rest
(attention, routing, messages) by a request to the embedded model, whose weights are small.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from launch.command_line.options import Options
from launch.doctor.bandwidth import CHILD, buffer_size, busy, embedded, last_cache, open_buffer, run_children
from launch.doctor.proof import prove
from launch.forecast import CONTEXT, Expected, Speeds, Spread
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.format import percent, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig, FormatName
from pipeline.models.registry import expert_shape
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import FORMATS, BlockFormat, FloeFormat, format_named
from shm.segment import available_memory, byte_size

SECONDS = 0.4  # of each measurement
SPARSE = PolicyRequest("floe-host")  # of which floe formats are expected, where no sparsity is asked for


async def measure_speeds(
    source: ModelSource, asked: EngineConfig, names: Sequence[str], options: Options, interrupts: Interrupts
) -> Speeds:
    """Takes about ten seconds. `names`: the formats. Raises TrialFailed."""
    notice("measuring how fast this machine would run it: about ten seconds")
    here, load = Cores.here(), os.getloadavg()[0]
    cores = [core for cpus in here.for_workers(here.default_workers()) for core in cpus.cores]
    cache, available = last_cache(), available_memory()
    shapes = [(name, astuple(expert_shape(source.config, asked.tile, format_named(name)))) for name in names]
    plain = not isinstance(FORMATS[asked.backbone_dtype], BlockFormat)
    size = buffer_size(cache, available)
    with open_buffer(size) as fd:
        base: dict[str, Any] = {"what": "kernels", "fd": fd, "size": size, "seconds": SECONDS}
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
    small = embedded()
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


def explain(forecasts: Mapping[FormatName, Expected], speeds: Speeds, asked: EngineConfig) -> list[str]:
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
        f" reads its experts, {byte_size(first.backbone)} of backbone in {dtype} and"
        f" {byte_size(first.kv)} of KV cache.{whole}",
        f"Measured here just now: all cores read up to {rate(speeds.memory)}; the expert kernels reach"
        f" {kernels} of that, the backbone {percent(speeds.backbone.usual / speeds.memory)}; the rest of a"
        f" layer takes {1e3 * speeds.layer:.2g} ms.",
    ]
