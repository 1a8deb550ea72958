"""The figures of `bench`: ratios, tables and JSON. No engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from counters import TILE, decode

from launch.bench.measure import Perplexity, PolicyResult, Run, Timeline
from launch.bench.report import Report
from launch.terminal.tables import render
from pipeline.policies.view import PolicyRequest

SNAPSHOT = """\
                   prefill         first    decode        copied workers'
policy               tok/s    x token ms     tok/s    x MB/token    share
mixtral-offloading     900 1.00      100      30.5 1.00     10.0      33%
                   900-900       100-100 30.0-31.0
daop                   900 1.00      100      30.5 1.00     10.0      33%
approximate        900-900       100-100 30.0-31.0

                    expert  on demand  prefetched  of it  replaced
policy                hits   MB/token    MB/token   used  MB/token
mixtral-offloading     50%       5.00        2.00    60%      3.00
daop                   50%       5.00        2.00    60%      3.00

                    workers  device  waiting for  waiting for   J/token
policy                 busy    busy      workers       copies  modelled
mixtral-offloading      10%     30%          20%          50%      19.2
daop                    10%     30%          20%          50%      19.2

                                                     added
policy  skipped  substituted  stale  predicted  perplexity
daop       0.0%        12.3%  25.0%      75.0%      +2.50%

a-model on cuda, 8 workers: experts bf16, backbone f32
expert cache: 16 tiles, 16.0 MB, 25% of all tiles
batch 1: 128 prompt tokens (held-out text), 11 generated tokens, sampled
2 rounds, policies interleaved: median, and below it the range
warm-up before each run, for all alike: 1 x 64 other tokens, 128 generated
x: speed relative to mixtral-offloading
perplexity: relative to mixtral-offloading, 256 decoded tokens
copied: to the device in decode
workers' share: of decode's expert tiles; the device computed the others
expert hits: share of the needed experts that were resident, in decode
on demand: a step waited for it
prefetched: before a step needed it
replaced: in the background, by replacement
busy, waiting: shares of decode's time; the device computes attention, resident
experts and the head
modelled: 150 W of the processor while workers compute, else 50; 300 W of the
GPU while it computes, else 60
skipped, substituted, stale, predicted: shares of the routed weight
note: dali left out: not calibrated
"""


def test_timeline_of_one_request() -> None:
    line = Timeline(sent=10.0, prompt_tokens=100, arrivals=np.array([[12.0, 12.5, 13.0, 13.5]]))
    assert (line.prefill_tok_s, line.first_token_s) == (50.0, 2.0)
    assert (line.decode_steps, line.decode_tok_s) == (3, 2.0)


def test_timeline_of_a_batch_counts_decode_only_while_all_requests_decode() -> None:
    first = (1.0, 2.0, 3.0, 4.0, 5.0)  # decodes alone until 2.5, and ends first
    second = (2.5, 3.0, 4.0, 5.0, 9.0)
    line = Timeline(sent=0.0, prompt_tokens=10, arrivals=np.array([first, second]))
    assert (line.prefill_tok_s, line.first_token_s) == (20 / 2.5, 1.75)
    assert (line.decode_steps, line.decode_tok_s) == (3, 6 / 2.5)
    assert Timeline(0.0, 10, np.array([[1.0, 2.0], [3.0, 4.0]])).decode_steps == 0


def test_ratio_pairs_the_runs_of_a_round() -> None:
    def entry(*speeds: float) -> PolicyResult:
        runs = [Run(1.0, 1.0, speed, {}) for speed in speeds]
        return PolicyResult(PolicyRequest("all-host"), runs=runs)

    first, second = entry(1.0, 10.0, 100.0), entry(2.0, 30.0, 400.0)
    assert second.ratio(first, "decode_tok_s") == 3.0
    assert first.ratio(first, "decode_tok_s") == 1.0


def test_report_in_80_columns() -> None:
    assert render(*whole_report().parts()) == SNAPSHOT


def test_report_says_what_differs_from_the_usual() -> None:
    """Paused prefetching, an emulated link, random weights."""
    report = whole_report()
    counted = decode(wanted_experts=40, issued_experts=30, paused_steps=4)
    runs = [Run(900.0, 0.1, 30.0, counted)] * 2
    config = report.config | {"model": "shape:mixtral-8x7b/4"}
    other = Report(config, [PolicyResult(PolicyRequest("dali"), runs=runs)], "link paced to 2 GB/s")
    text = " ".join(render(*other.parts()).split())
    for words in (
        "note: dali: prefetching paused in 8 of 20 decode steps",
        "emulation: link paced to 2 GB/s",
        "note: random weights route at random",
    ):
        assert words in text
        assert words not in SNAPSHOT
    measured = [Run(900.0, 0.1, 30.0, counted, {"gpus": joules}) for joules in (3.0, 5.0)]
    table = render(*Report(config, [PolicyResult(PolicyRequest("dali"), runs=measured)], "").parts())
    assert "gpus" in table
    assert "4.00" in table
    assert "modelled" not in table
    plain = other.to_json()
    assert len(plain["notes"]) == 1
    prefetches = plain["policies"][0]["decode"]["prefetches"]
    assert prefetches == {"wanted": 80, "issued": 60, "share": 0.75, "paused_steps": 8}


def whole_report() -> Report:
    """Two policies that fill every column and legend line, and one that was left out."""
    config = {
        **{"model": "/models/a-model", "device": "cuda", "workers": 8, "format": "bf16"},
        **{"backbone_dtype": "f32", "expert_cache": 0.25, "cache_tiles": 16, "tile_bytes": TILE},
        **{"prompts": "held-out text", "batch": 1, "prompt_len": 128, "gen_len": 11, "rounds": 2},
        "warm_up_tokens": (64, 128),
    }

    def entry(name: str, exact: bool, **counters: Any) -> PolicyResult:
        runs = [Run(900.0, 0.1, 30.0 + n, decode(placed_tiles=30, **counters)) for n in range(2)]
        return PolicyResult(PolicyRequest(name), exact, runs=runs)

    exact = entry("mixtral-offloading", True)
    approximate = entry("daop", False, substituted=7.38, stale=15.0, predicted=45.0)
    approximate.perplexity = Perplexity(10.25, 10.0, "mixtral-offloading", 256, 128)
    return Report(
        config, [exact, approximate], "", [PolicyResult(PolicyRequest("dali"), left_out="not calibrated")]
    )
