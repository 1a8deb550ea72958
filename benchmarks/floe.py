"""FloE's page for Mixtral-8x7B on a GPU of 11, 12 and 24 GB.

Routing is drawn for Mixtral's shape. The costs are those of the paper's RTX 3090, whose link and device it
gives twice. Its processor is not named: the host reads 100 GB/s. Every preset has the GPU's whole memory: up
matrices, predictors, staging and reserve are taken from the cache.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import mean

from benchmarks.evidence_commands import Commands
from benchmarks.inputs import alike
from benchmarks.papers import Job, Text, Words, drawn, replayed, write
from pipeline.memory.needs import staging_tiles
from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import PROFILES
from shm.layout import ExpertShape, StoreLayout, format_named

MIXTRAL = ExpertShape(32, 8, 4096, 14336, 896)
SHAPE, TOP_K = ModelShape(32, 8, MIXTRAL.tiles, 2), 2
# Bytes a second: an expert's 300 MB in 15 ms over the link and in 5 ms on the device are the first ones, its
# "32GB/s" and "300GB/s" the last.
LINKS, DEVICES = (20e9, 32e9), (60e9, 100e9, 300e9)
LINK, DEVICE, HOST = LINKS[0], DEVICES[0], 100e9
BESIDE = 2 * 42e6  # bytes of a layer beside its experts
MEMORY = {"11 GB": 11e9, "12 GB": 12e9, "24 GB": 24e9}
RESIDENT = 3.2e9 + 1.5e9  # the backbone in bf16; KV cache, a step's allocations, the context
LEARNED = 2.19e9  # bytes of its predictors with 95 %, at least; those that reuse the next gate need none
PREDICTED = {"learned": (0.95, 0.95, LEARNED), "reused": (0.79, None, 0.0)}  # experts, channels, bytes
WHOLE = 94e9  # the paper's bytes of Mixtral
ROWS = (1, 2, 4)
SWEPT = ("floe:sparsity=0.8", "floe:sparsity=0.9")
POLICIES = {
    "bf16": ("whole-layer", "on-demand", "mixtral-offloading", "fiddler", "tandem"),
    "int4": ("mixtral-offloading", "tandem"),
    "floe": ("floe", "floe:prediction=none", "floe-host"),
    "floe-int4": ("floe", "floe-host"),
}


def layout_of(format: str) -> StoreLayout:
    return StoreLayout(MIXTRAL, format_named(format))


def costs_of(format: str, rate: float, link: float = LINK) -> Costs:
    """Returns a tile's costs on a device and over a link of so many bytes a second."""
    layout = layout_of(format)
    read = layout.head_bytes + layout.tile_bytes
    return Costs(
        rows=ROWS,
        host=(read / HOST,) * len(ROWS),
        device=(read / rate,) * len(ROWS),
        link=layout.tile_bytes / link,
        round_trip=6e-5,
        other=(BESIDE / rate,) * len(ROWS),
        fetch=1e-5,
    )


def share_of(format: str, memory: float) -> float:
    """Returns the share of the tiles that the cache holds; below 0 where the up matrices do not fit."""
    layout = layout_of(format)
    heads = layout.head_stride * MIXTRAL.experts * MIXTRAL.layers
    staging = staging_tiles(MIXTRAL.tiles, TOP_K, layout.head_bytes > 0)
    tiles = (memory - RESIDENT - heads) // layout.tile_bytes - staging
    return float(tiles / (MIXTRAL.experts * MIXTRAL.tiles * MIXTRAL.layers))


def texts(accuracy: float, tokens: int) -> dict[str, Text]:
    """Returns the same routing for each format, of which so much is predicted."""
    made = drawn(SHAPE, replace(PROFILES["mixtral-8x7b"], accuracy=accuracy), 0, tokens)

    def header(format: str) -> Text:
        layout = layout_of(format)
        up = "int2" if layout.head_bytes else ""
        return Text(
            replace(made.header, tile_bytes=layout.tile_bytes, up=up, up_bytes=layout.head_bytes), made.text
        )

    return {f"{format}, {accuracy:g}": header(format) for format in POLICIES}


def streamed(memory: float, rate: float, link: float = LINK) -> float:
    """Tokens a second of a program that moves every layer to the device as a whole, needed or not, as
    DeepSpeed's inference does: all experts but those that its cache holds, while others are computed. No
    preset does that: `whole-layer` moves what is needed first, and the rest in the time that is left."""
    size = layout_of("bf16").expert_bytes
    device = MIXTRAL.layers * (TOP_K * size + BESIDE) / rate
    moved = (1 - share_of("bf16", memory)) * MIXTRAL.experts * MIXTRAL.layers * size
    return 1 / max(moved / link, device)


def compression(sparsity: float) -> tuple[float, float, float]:
    """Times that an expert in 16 bits is larger than what is read of it: with up in 2 bits without scales, as
    the paper counts, with up as it is stored here, and than what crosses the link, without up."""
    layout = layout_of("floe")
    whole = 3 * MIXTRAL.hidden * MIXTRAL.intermediate * 2
    kept = (1 - sparsity) * layout.tile_bytes * MIXTRAL.tiles
    return whole / (whole / 24 + kept), whole / (layout.head_bytes * MIXTRAL.tiles + kept), whole / kept


def _job(
    format: str, policy: str, memory: str, by: str = "learned", rate: float = DEVICE, link: float = LINK
) -> Job:
    accuracy, right, taken = PREDICTED[by]
    taken *= format in ("floe", "floe-int4") and "none" not in policy and policy != "floe-host"
    labels = ("GPU", memory), ("rate", rate), ("link", link), ("predictors", by)
    share = share_of(format, MEMORY[memory] - taken)
    return Job(f"{format}, {accuracy}", policy, costs_of(format, rate, link), share, labels, right)


def page(c: Commands) -> str:
    """Returns FloE's page."""
    every = texts(0.95, 32) | texts(0.79, 32)
    jobs = [
        _job(format, policy, memory)
        for format, policies in POLICIES.items()
        for policy in policies
        for memory in ("12 GB", "24 GB")
    ]
    settings = [("12 GB", "learned"), ("12 GB", "reused"), ("11 GB", "reused")]
    sweep = list(product(SWEPT, settings, LINKS, DEVICES))
    jobs += [_job("floe", policy, *setting, rate, link) for policy, setting, link, rate in sweep]
    found = replayed(every, jobs)
    over: dict[tuple[str, tuple[str, str]], list[float]] = {}
    for policy, (memory, by), link, rate in sweep:
        wanted = {"policy": policy, "GPU": memory, "predictors": by, "rate": rate, "link": link}
        speed = found.get("tok_s", **wanted)[0] / streamed(MEMORY[memory], rate, link)
        over.setdefault((policy, (memory, by)), []).append(speed)
    tenth, fifth = compression(0.9), compression(0.8)
    experts = MIXTRAL.experts * MIXTRAL.layers * layout_of("floe").tile_bytes * MIXTRAL.tiles
    least = RESIDENT - share_of("floe", RESIDENT) * experts
    known = alike()
    ours = {
        "nine": over[SWEPT[1], settings[0]] + over[SWEPT[1], settings[1]],
        "eight": over[SWEPT[0], settings[0]] + over[SWEPT[0], settings[1]],
        "eleven": over[SWEPT[1], settings[2]],
        "bytes": tenth[:1],
        "footprint": [WHOLE / (least + LEARNED), WHOLE / least],
        "channels": [mean(known.channels)],
        "cosine": known.cosine,
        "experts": [float(c.calibration().accuracy["raw"][1:].mean())],
    }
    words: dict[str, Words] = {
        "channels": ", ".join(f"{share:.0%}" for share in known.channels),
        "cosines": ", ".join(f"{cosine:.2f}" for cosine in known.cosine),
        "read90": tenth[1],
        "link90": tenth[2],
        "count80": fifth[0],
        "read80": fifth[1],
        "link80": fifth[2],
        "least": f"{least / 1e9:.2f} GB, and {(least + LEARNED) / 1e9:.2f}",
    }
    head = [f"{link / 1e9:.0f}, {rate / 1e9:.0f}" for link, rate in product(LINKS, DEVICES)]
    lines = [
        "## Over every layer streamed, by GB/s of link and device",
        "",
        "| left out, GPU, predictors | " + " | ".join(head) + " |",
        "|---" * (1 + len(head)) + "|",
        *(
            f"| {policy[-3:]}, {memory}, {by} | " + " | ".join(f"{x:.0f}" for x in ratios) + " |"
            for (policy, (memory, by)), ratios in over.items()
        ),
    ]
    tables = [
        found.table(
            f"{text} predicted: tok/s at 20 and 60 GB/s", "", "GPU", text=text, rate=DEVICE, link=LINK
        )
        for text in every
        if found.get("tok_s", text=text)
    ]
    return write("floe", ours, words, ["\n".join(lines), *tables])
