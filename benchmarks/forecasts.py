"""Tokens a second by the model of costs, beside what others have published: a Markdown table.

    python -m benchmarks.forecasts

Each row replays drawn routing on a machine described by its rates, with a cache of a share of the experts
(`launch/forecast.py`). To each modelled step is added what the replay takes of this machine's Python, in
parentheses as microseconds a layer, the median of five runs: the policy plans and the cache is kept there as
in an engine, and the model lets nothing of that overlap with the GPU. Nothing here is measured on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tandem import Recorded, speed
from launch.advise.machine import elsewhere
from launch.advise.search import fitting
from launch.forecast import Setting, by_replay, drawn, sizes_of
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig, FormatName
from pipeline.memory.needs import cache_tiles
from pipeline.policies.view import PolicyRequest

PROMPT, CONTEXT = 128, 4096  # tokens
POLICIES = ("layerwise", "cache", "tandem")  # the first divides as llama.cpp's -ncmoe does: whole layers

# About 80 % of data sheets, as the machines of `pipeline/policies/costs.py`; the host beside the 5090 as it
# was published. Keys are options of `advise`.
RTX_5070 = {"gpu_gb": 12.0, "gpu_gbps": 540.0, "link_gbps": 50.0, "host_gbps": 70.0}
RTX_5090 = {"gpu_gb": 32.0, "gpu_gbps": 1430.0, "link_gbps": 50.0, "host_gbps": 71.6}


@dataclass(frozen=True)
class Case:
    """`share`: of all experts on the GPU; None: those that fit. `published`: tokens a second of others."""

    model: str
    format: FormatName
    card: str
    machine: dict[str, Any]
    share: float | None
    published: str = "-"


CASES = (
    *(
        Case("mixtral-8x7b", "int4", "A100, PCIe 4", {"machine": "a100-pcie4"}, share)
        for share in (0.25, 0.5, 1.0)
    ),
    *(
        Case("qwen3-30b-a3b", "int4", "RTX 4090, PCIe 4", {"machine": "4090-pcie4"}, share)
        for share in (0.25, 0.5, 1.0)
    ),
    Case(
        *("qwen3-30b-a3b", "int4", "RTX 5070, PCIe 5", RTX_5070, None),
        "llama.cpp 81.7, an LRU cache 119, with one graph a token 147",
    ),
    *(
        Case("gpt-oss-120b", "mxfp4", "RTX 5090, PCIe 5", RTX_5090, share, published)
        for share, published in (
            (0.11, "llama.cpp 34.9, FreeToken 54, best 70"),
            (0.25, "llama.cpp 40.0, FreeToken 86, best 109"),
            (0.4, "llama.cpp 47.7, FreeToken 132, best 153"),
        )
    ),
)


def cells(case: Case) -> Iterator[str]:
    """Returns the cells of a row."""
    hardware, source = elsewhere(case.machine), open_config(Path(f"shape:{case.model}"))
    assert hardware is not None
    config = EngineConfig(
        device="cuda", workers=1, format=case.format, backbone_dtype="int4", context=CONTEXT
    )
    sizes = sizes_of(source, config, case.format)
    share = case.share
    if share is None:
        share = fitting(sizes, config, hardware).plan.expert_cache
    text, priced = drawn(sizes.header, PROMPT, PROMPT, 0), hardware.priced(sizes, PROMPT)
    decode = [step for step in text.steps[text.begin :] if step.phase == "decode"]
    replayed = Recorded.of(case.model, sizes.header, list(text.steps[: text.begin]), decode)
    yield from (case.model, case.format, case.card, f"{share:.0%}")
    for policy in POLICIES:
        python = speed(replayed, priced.costs, share, policy) / 1e6  # seconds a layer
        setting = Setting(PolicyRequest(policy), case.format, cache_tiles(share, sizes.needs.tiles), share)
        modelled = by_replay(setting, sizes, priced, text, PROMPT, 0)
        layers = (1 - modelled.planning) / modelled.tok_s  # the decisions are part of `python`
        yield f"{1 / (layers + python * sizes.header.shape.layers):.1f} ({python * 1e6:.0f})"
    yield case.published


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    heads = ["model", "format", "GPU", "experts there", *(f"`{name}`, modelled" for name in POLICIES)]
    heads.append("published, tokens/s")
    print(f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", sep="\n")
    for case in CASES:
        print(f"| {' | '.join(cells(case))} |", flush=True)


if __name__ == "__main__":
    main()
