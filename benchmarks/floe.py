"""FloE's figures for Mixtral-8x7B on a GPU of 11 and of 24 GB, by replay, and on an engine that emulates one.

    python -m benchmarks.floe [--tokens N] [--accuracy A] [--right R] [--sweep]

Routing is drawn for Mixtral's shape as in `benchmarks/moepic.py`. The costs are those of the paper's RTX 3090
where it has any: an expert's 300 MB in 15 ms over the link, and in 5 ms on the device. Its processor is not
named: the host reads 100 GB/s, or 40. Every preset has the GPU's whole memory: up matrices, staging and
reserve are taken from the cache. Times are of the layers alone. `--sweep`: `floe` beside every layer streamed
over the device's rate, of which the paper gives two, and over the share that is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.evidence_commands import Commands, Row, relative
from launch.profile import PhaseProfile
from pipeline.assets import model_dir
from pipeline.checkpoint.open import open_model
from pipeline.memory.needs import staging_tiles
from pipeline.models.facts import expert_shape
from pipeline.models.routing import Softmax
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import RIGHT, Replay
from pipeline.traces.synthetic import EMBEDDED, PROFILES, Skew, SyntheticText
from pipeline.traces.trace import Header, TracedStep
from shm.layout import ExpertShape, StoreLayout, format_named

MIXTRAL = ExpertShape(32, 8, 4096, 14336, 896)
TOP_K = 2
LINK, DEVICE = 300e6 / 15e-3, 300e6 / 5e-3  # bytes a second
HOSTS = (100e9, 40e9)
BESIDE = 2 * 42e6  # bytes of a layer beside its experts
DEVICES = (60e9, 100e9, 200e9, 300e9)  # bytes a second: its 5 ms are the first, its "300GB/s" the last
MEMORY = {"11 GB": 11e9, "24 GB": 24e9}
TARGET = {"12 GB": 12e9}  # where it verifies its headline
RESIDENT = 3.2e9 + 1.5e9  # the backbone in bf16; KV cache, a step's allocations, the context
ROWS = (1, 2, 4)
WARM = 40  # tokens before those that are measured


@dataclass(frozen=True)
class Case:
    """A preset in the format that it is usually run in."""

    name: str
    format: str
    preset: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(MIXTRAL, format_named(self.format))

    def costs(self, host: float, rate: float) -> Costs:
        """Returns a tile's costs, with so many bytes a second on the host and on the device."""
        layout = self.layout
        read = layout.head_bytes + layout.tile_bytes
        return Costs(
            rows=ROWS,
            host=(read / host,) * len(ROWS),
            device=(read / rate,) * len(ROWS),
            link=layout.tile_bytes / LINK,
            round_trip=6e-5,
            other=(BESIDE / rate,) * len(ROWS),
            fetch=1e-5,
        )

    def capacity(self, memory: float) -> int:
        """Tiles of the cache; below 0 where the up matrices alone do not fit."""
        layout = self.layout
        heads = layout.head_stride * MIXTRAL.experts * MIXTRAL.layers
        staging = staging_tiles(MIXTRAL.tiles, TOP_K, layout.head_bytes > 0)
        return int((memory - RESIDENT - heads) // layout.tile_bytes) - staging


NO_GUESS = (("prediction", "none"),)
CASES = (
    Case("whole-layer", "bf16", "whole-layer"),
    Case("on-demand", "bf16", "on-demand"),
    Case("mixtral-offloading", "bf16", "mixtral-offloading"),
    Case("mixtral-offloading", "int4", "mixtral-offloading"),
    Case("fiddler", "bf16", "fiddler"),
    Case("tandem", "bf16", "tandem"),
    Case("tandem", "int4", "tandem"),
    Case("floe", "floe", "floe"),
    Case("floe, no prediction", "floe", "floe", NO_GUESS),
    Case("floe, 0.9", "floe", "floe", (("sparsity", "0.9"),)),
    Case("floe", "floe-int4", "floe"),
    Case("floe-host", "floe", "floe-host"),
    Case("floe-host", "floe-int4", "floe-host"),
)


def header_of(case: Case) -> Header:
    layout = case.layout
    shape = ModelShape(MIXTRAL.layers, MIXTRAL.experts, MIXTRAL.tiles, TOP_K)
    up = "int2" if layout.head_bytes else ""
    router = Softmax(TOP_K, rescaled=True)
    return Header(
        "drawn", "0" * 64, "0" * 64, shape, layout.tile_bytes, router, 1, up=up, up_bytes=layout.head_bytes
    )


def speed(
    case: Case, host: float, memory: float, steps: Sequence[TracedStep], right: float, rate: float = DEVICE
) -> Row:
    """Tokens a second, without the first WARM, and bytes a token over the link."""
    capacity = case.capacity(memory)
    if capacity < 0:
        return {"tok_s": None, "mb": None, "hits": None}
    text = SyntheticText(header_of(case), EMBEDDED)
    policy = make_policy(PolicyRequest(case.preset, dict(case.options)), 0)
    machine = Replay(
        header_of(case), policy, case.costs(host, rate), capacity, popularity=text.counts(400), right=right
    )
    began, moved, size = 0.0, 0, case.layout.tile_bytes
    counters = machine.outcome.counters
    for place, step in enumerate(steps):
        if place == WARM:
            began, moved = machine.now, PhaseProfile(counters.snapshot()["decode"], size).copied
        machine.step(step)
    tokens, decode = len(steps) - WARM, PhaseProfile(counters.snapshot()["decode"], size)
    return {
        "tok_s": tokens / (machine.now - began),
        "mb": (decode.copied - moved) / tokens / 1e6,
        "hits": decode.hit_rate,
    }


def streamed(rate: float = DEVICE) -> Row:
    """A program that moves every layer to the device as a whole, needed or not, as DeepSpeed's inference
    does: all experts but those that its cache holds, while others are computed. No preset does that:
    `whole-layer` moves what is needed first, and whole layers in the time that is left."""
    case = Case("every layer streamed", "bf16", "")
    experts, size = MIXTRAL.experts * MIXTRAL.layers, case.layout.expert_bytes
    device = (MIXTRAL.layers * (TOP_K * size + BESIDE)) / rate
    row: Row = {"preset": case.name, "format": case.format}
    for label, memory in (MEMORY | TARGET).items():
        moved = max(0, experts - case.capacity(memory) // MIXTRAL.tiles) * size
        for host in HOSTS:
            row[f"{label}, host {host / 1e9:.0f}"] = 1 / max(moved / LINK, device)
        row[f"{label}, MB"] = moved / 1e6
    return row


def swept(tokens: int, skew: Skew, right: float) -> list[Row]:
    """A row for each rate of the device, share of channels that is left out, and memory: `floe`, every layer
    streamed on the same device, and their ratio."""
    rows = []
    for sparsity in ("0.8", "0.9"):
        case = Case("floe", "floe", "floe", (("sparsity", sparsity),))
        steps = SyntheticText(header_of(case), skew).steps(prompt=0, chunk=1, tokens=tokens + WARM)
        for label, memory in (MEMORY | TARGET).items():
            for rate in DEVICES:
                found = speed(case, HOSTS[0], memory, steps, right, rate)["tok_s"]
                whole = streamed(rate)[f"{label}, host {HOSTS[0] / 1e9:.0f}"]
                row: Row = {"left out": sparsity, "memory": label, "device GB/s": rate / 1e9}
                rows.append(row | {"streamed": whole, "floe": found, "x": found / whole})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def compression() -> list[Row]:
    """Times that an expert in 16 bits is larger than what is read of it: with up in 2 bits without scales, as
    the paper counts, with up as it is stored here, and than what crosses the link, without up."""
    layout = StoreLayout(MIXTRAL, format_named("floe"))
    whole = 3 * MIXTRAL.hidden * MIXTRAL.intermediate * 2
    rows = []
    for sparsity in (0.8, 0.9):
        kept = (1 - sparsity) * layout.tile_bytes * MIXTRAL.tiles
        heads = layout.head_bytes * MIXTRAL.tiles
        row: Row = {"left out": sparsity, "paper's count": whole / (whole / 3 / 8 + kept)}
        rows.append(row | {"read": whole / (heads + kept), "link": whole / kept})
    return rows


def replayed(tokens: int, accuracy: float, right: float) -> list[Row]:
    """A row for each case: tokens a second by memory and host."""
    skew = replace(EMBEDDED, accuracy=accuracy)
    rows = [streamed()]
    for case in CASES:
        row: Row = {"preset": case.name, "format": case.format}
        steps = SyntheticText(header_of(case), skew).steps(prompt=0, chunk=1, tokens=tokens + WARM)
        for label, memory in MEMORY.items():
            for host in HOSTS:
                found = speed(case, host, memory, steps, right)
                row[f"{label}, host {host / 1e9:.0f}"] = found["tok_s"]
            row[f"{label}, MB"] = found["mb"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


EMULATED = "whole-layer,on-demand,mixtral-offloading,fiddler"
SPARSE = "floe,floe:prediction=none,floe:sparsity=0.9"


def floe(c: Commands) -> dict[str, list[Row]]:
    """Also engines of the embedded model: experts in bf16 for the baselines, and in `floe` with an equal
    memory, up matrices included. The link is paced to these costs; the workers are as fast as they are."""
    tiles = MIXTRAL.experts * MIXTRAL.tiles * MIXTRAL.layers
    words = ("--workers", "1", "--ppl-tokens", "0", "--prompt-len", "32", "--gen-len", "32", "--rounds", "2")
    pace = ("--link-gbps", f"{_emulated_link(c, words):.3g}")
    rows = []
    for label, memory in MEMORY.items():
        for format, policies in (("bf16", EMULATED), ("floe", SPARSE)):
            share = max(0.0, Case("", format, "").capacity(memory) / tiles)
            given = ("--format", format, "--expert-cache", f"{share:.3f}", *words, *pace)
            found = c.measure(f"floe-{format}-{label.split()[0]}", policies, *given)
            rows += [{"memory": label, "format": format, "cache": share} | row for row in found]
    relative(rows, "on-demand", "memory")
    tables = {
        f"FloE, replayed, {a:g} and {r:g}": replayed(200, a, r) for a, r in ((0.79, RIGHT), (0.95, 0.95))
    }
    tables["FloE's bytes"] = compression()
    tables["FloE, over the device's rate"] = swept(200, replace(EMBEDDED, accuracy=0.95), 0.95)
    return {**tables, "FloE, emulated": rows}


def _emulated_link(c: Commands, words: Sequence[str]) -> float:
    """GB/s at which an expert of the embedded model, compared with a layer whose experts are resident, takes
    as long as one of Mixtral's in bf16 does with these costs."""
    shape = expert_shape(open_model(model_dir()).config, None, format_named("bf16"))
    whole = ("--policy", "layerwise", "--expert-cache", "1", "--format", "bf16")
    resident = c.run("floe-resident", "bench", *whole, *words)
    layer = 1 / resident["policies"][0]["decode_tok_s"]["max"] / shape.layers  # s; the least disturbed run's
    expert = CASES[1].layout.expert_bytes
    ratio = (expert / LINK) / (TOP_K * expert / DEVICE + BESIDE / DEVICE)
    pace: float = StoreLayout(shape, format_named("bf16")).expert_bytes / (ratio * layer) / 1e9
    return pace


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200, help="measured")
    parser.add_argument("--accuracy", type=float, default=EMBEDDED.accuracy, help="of predicted experts")
    parser.add_argument(
        "--right", type=float, default=RIGHT, help="share of predicted channels that are kept"
    )
    parser.add_argument("--profile", choices=list(PROFILES), help="draw this model's routing instead")
    parser.add_argument("--sweep", action="store_true", help="over the device's rate")
    given = parser.parse_args()
    if given.sweep:
        skew = PROFILES[given.profile] if given.profile else EMBEDDED
        rows = compression() + swept(given.tokens, replace(skew, accuracy=given.accuracy), given.right)
    else:
        rows = replayed(given.tokens, given.accuracy, given.right)
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
