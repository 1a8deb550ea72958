"""The figures of `bench`: ratios, tables, JSON and plots. No engine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counters import TILE, decode

from launch.bench.perplexity import Perplexity
from launch.bench.plot import draw
from launch.bench.profile_table import legend
from launch.bench.report import Report
from launch.bench.result import PolicyResult
from launch.bench.run import Run, Timeline
from launch.errors import OutputFailed
from launch.terminal.format import alike
from pipeline.policies.view import PolicyRequest


def test_timeline_of_one_request() -> None:
    line = Timeline(sent=10.0, prompt_tokens=100, arrivals=((12.0, 12.5, 13.0, 13.5),))
    assert line.prefill_tok_s == 50.0
    assert line.first_token_s == 2.0
    assert line.decode_steps == 3
    assert line.decode_tok_s == 2.0


def test_timeline_of_a_batch_counts_decode_only_while_all_requests_decode() -> None:
    first = (1.0, 2.0, 3.0, 4.0, 5.0)  # decodes alone until 2.5, and ends first
    second = (2.5, 3.0, 4.0, 5.0, 9.0)
    line = Timeline(sent=0.0, prompt_tokens=10, arrivals=(first, second))
    assert line.prefill_tok_s == 20 / 2.5
    assert line.first_token_s == 1.75
    assert line.decode_steps == 3
    assert line.decode_tok_s == 6 / 2.5


def test_timeline_without_overlap_has_no_decode_steps() -> None:
    assert Timeline(0.0, 10, ((1.0, 2.0), (3.0, 4.0))).decode_steps == 0


def test_ratio_pairs_the_runs_of_a_round() -> None:
    def entry(*speeds: float) -> PolicyResult:
        runs = [Run(1.0, 1.0, speed, 0, 0.0, 0.5) for speed in speeds]
        return PolicyResult(PolicyRequest("all-host"), runs=runs)

    first, second = entry(1.0, 10.0, 100.0), entry(2.0, 30.0, 400.0)
    assert second.ratio(first, "decode_tok_s") == 3.0
    assert first.ratio(first, "decode_tok_s") == 1.0


def test_report_fits_80_columns_and_names_the_emulation() -> None:
    config = {
        **{"model": "/models/a-model", "device": "cuda", "workers": 8, "format": "bf16"},
        **{"backbone_dtype": "f32", "expert_cache": 0.25, "cache_tiles": 16, "tile_bytes": 393216},
        **{"prompts": "held-out text", "batch": 8, "prompt_len": 512, "gen_len": 128, "rounds": 2},
        "warm_up_tokens": (64, 64),
    }
    runs = [Run(12345.6, 12.3456, 1234.5, 10**9, 5e8, 0.755), Run(9876.5, 9.87654, 98.765, 10**9, 5e8, 0.755)]
    request = PolicyRequest("mixtral-offloading", {"scope": "global"})
    entries = [
        PolicyResult(PolicyRequest("all-host"), runs=runs),
        PolicyResult(request, exact=False, notes=["it keeps whole experts"], runs=runs),
    ]
    text = Report(config, entries, "link paced to 2 GB/s").render()
    assert max(map(len, text.splitlines())) <= 80
    for words in ("emulation: link paced to 2 GB/s", "mixtral-offloading", "scope=global", "approximate"):
        assert words in text
    assert "not calibrated" not in text
    mixed = config | {"uncalibrated": ["fiddler"], "counted_tokens": 300}
    line = "fiddler: not calibrated, experts placed by their use in 300 tokens of other text"
    assert line in " ".join(Report(mixed, entries, "").render().split())
    for words in ("note: it keeps whole experts", "a-model on cuda, 8 workers", "11111", "500", "1.00"):
        assert words in text


def test_table_compares_policies_with_the_first() -> None:
    config = whole_report().config
    results = [
        PolicyResult(PolicyRequest(name), runs=[Run(*figures, decode=decode()) for figures in rounds])
        for name, rounds in (
            ("all-host", [(100.0, 0.2, 10.0, 0, 2e6, 0.5), (140.0, 0.4, 20.0, 0, 4e6, 0.7)]),
            ("fiddler", [(200.0, 0.1, 5.0, 0, 0.0, 1.0), (420.0, 0.1, 10.0, 0, 0.0, 1.0)]),
        )
    ]
    rows = Report(config, results, "").render().splitlines()
    at = next(i for i, line in enumerate(rows) if line.startswith("all-host"))
    cells = [" ".join(line.split()) for line in rows[at : at + 4]]
    assert cells == [
        "all-host 120 1.00 300 15.0 1.00 3.00 60%",
        "100-140 200-400 10.0-20.0",
        "fiddler 310 2.50 100 7.5 0.50 0.00 100%",
        "200-420 100-100 5.0-10.0",
    ]
    plain = Report(config, results, "").to_json()["policies"][1]
    assert plain["exact"]
    assert plain["prefill_tok_s"] == {"median": 310.0, "min": 200.0, "max": 420.0, "runs": [200.0, 420.0]}
    assert (plain["prefill_ratio"], plain["decode_ratio"], plain["host_share"]) == (2.5, 0.5, 1.0)
    alone = Report(
        config | {"workers": None, "machine": "here", "when": "2026-01-02T03"}, results[:1], ""
    ).render()
    assert "a-model on cuda: experts bf16" in alone
    assert re.search("^here, 2026-01-02$", alone, re.M)
    assert "all-host 120 300 15.0 3.00 60%" in " ".join(alone.split())
    assert "x: " not in alone
    assert "uncalibrated" not in alone
    assert "x: speed relative to all-host" in "\n".join(rows)


def test_columns_of_what_no_policy_does_are_left_out() -> None:
    """A policy that does it is enough for a column; a policy without a figure has none in it."""
    report = whole_report()
    still: dict[str, Any] = {"fetched_tiles": 0, "predicted_tiles": 0, "useful_tiles": 0, "late_tiles": 0}
    runs = [Run(900.0, 0.1, 30.0, 0, 0.0, 0.5, 0.0, decode(**still))] * 2
    idle = PolicyResult(PolicyRequest("all-host"), runs=runs)
    text = replace(report, results=[idle]).render()
    for words in (
        "on demand",
        "prefetched",
        "replaced",
        "copies",
        "approximate",
        "routed weight",
        "perplexity",
    ):
        assert words not in text
    text = replace(report, results=[idle, *report.results]).render()
    rows = [" ".join(line.split()) for line in text.splitlines() if line.startswith("all-host")]
    assert rows[1] == "all-host 50% 0.00 0.00 - 0.00"
    approximate = replace(report.results[1], perplexity=None)
    worse = replace(approximate, perplexity=Perplexity(8.8, 10.0, "all-host", 256, 128))
    slight = replace(approximate, perplexity=Perplexity(9.99, 10.0, "all-host", 256, 128))
    text = replace(report, results=[approximate, worse, slight]).render()
    ends = [line.split()[-1] for line in text.splitlines() if line.startswith("daop") and "25.0%" in line]
    assert ends == ["-", "-12%", "-0.10%"]
    for words in ("on demand: ", "prefetched: ", "replaced: ", "shares of the routed weight"):
        assert words in text


def test_report_says_how_many_prefetches_were_issued_and_in_how_many_steps_they_paused() -> None:
    report = whole_report()
    counted = decode(wanted_experts=40, issued_experts=30, paused_steps=4)
    runs = [Run(900.0, 0.1, 30.0, 0, 0.0, 0.5, 0.0, counted)] * 2
    report = replace(report, results=[PolicyResult(PolicyRequest("dali"), runs=runs)])
    text = " ".join(report.render().split())
    assert "prefetches" in text
    assert "75%" in text
    assert "note: dali: prefetching paused in 8 of 20 decode steps" in text
    prefetches = report.to_json()["policies"][0]["decode"]["prefetches"]
    assert prefetches == {"wanted": 80, "issued": 60, "share": 0.75, "paused_steps": 8}


def test_legend_names_the_policy_of_the_first_perplexity() -> None:
    """Wherever the results without one are; and each line only with its column."""
    exact, approximate = whole_report().results
    other = replace(approximate, perplexity=Perplexity(11.0, 10.0, "fiddler", 64, 8))
    line = "perplexity: relative to mixtral-offloading, 256 decoded tokens, prose"
    for results in ([exact, approximate], [approximate, exact], [exact, approximate, other]):
        profiles = [result.decode(TILE) for result in results]
        assert legend(results, profiles, "prose")[-1] == line
        assert sum(text.startswith("perplexity") for text in legend(results, profiles, "prose")) == 1
    for results, expected in (
        ([replace(approximate, perplexity=None)], "skipped, substituted, stale, predicted: shares of the"),
        ([exact], "experts and the head"),
    ):
        assert legend(results, [results[0].decode(TILE)], "prose")[-1].startswith(expected)
    assert legend([], [], "prose") == []


def whole_report() -> Report:
    """Two policies that fill every column and legend line, and one that was left out."""
    config = {
        **{"model": "/models/a-model", "device": "cuda", "workers": 8, "format": "bf16"},
        **{"backbone_dtype": "f32", "expert_cache": 0.25, "cache_tiles": 16, "tile_bytes": TILE},
        **{"prompts": "held-out text", "batch": 1, "prompt_len": 128, "gen_len": 11, "rounds": 2},
        "warm_up_tokens": (64, 128),
    }

    def entry(name: str, exact: bool, **counters: Any) -> PolicyResult:
        runs = [Run(900.0, 0.1, 30.0 + n, 10**6, 7e4, 0.5, 3e6, decode(**counters)) for n in range(2)]
        return PolicyResult(PolicyRequest(name), exact, runs=runs)

    exact = entry("mixtral-offloading", True)
    approximate = entry("daop", False, substituted=7.38, stale=15.0, predicted=45.0)
    approximate.perplexity = Perplexity(10.25, 10.0, "mixtral-offloading", 256, 128)
    return Report(
        config, [exact, approximate], "", [PolicyResult(PolicyRequest("dali"), left_out="not calibrated")]
    )


@pytest.mark.parametrize("colours", ["", "1"])
def test_profile_table_shows_causes_and_fits_80_columns(colours: str, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[0-9;]*m", "", whole_report().render())
    assert max(map(len, text.splitlines())) <= 80
    plain = re.sub(" +", " ", text)
    for name in ("mixtral-offloading", "daop"):
        # hits; MB on demand, prefetched; of those used; MB replaced
        assert f"{name} 50% 5.00 2.00 60% 3.00\n" in plain
        assert f"{name} 10% 30% 20% 50%\n" in plain  # workers, device busy; waiting for workers, copies
    assert "daop 0.0% 12.3% 25.0% 75.0% +2.50%\n" in plain  # of the weight; perplexity
    assert "perplexity: relative to mixtral-offloading, 256 decoded tokens, held-out text" in text
    assert "warm-up before each run, for all alike: 1 x 64 other tokens, 128 generated\n" in text
    assert "note: dali left out: not calibrated" in text


@pytest.mark.parametrize("columns", ["60", "80", "110"])
def test_headings_do_not_break_within_words(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    words = set(re.sub(r"\x1b\[[0-9;]*m", "", whole_report().render()).replace("\n", " ").split())
    for word in (
        "prefill",
        "decode",
        "MB/token",
        "prefetched",
        "replaced",
        "waiting",
        "substituted",
        "perplexity",
    ):
        assert word in words
    assert not any(word.endswith(("-", "…")) for word in words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([3067.0, 41.7], ["3067", "42"]),
        ([41.7, 7.08], ["41.7", "7.1"]),
        ([134.2, 98.6], ["134", "99"]),
        ([0.42, 0.0, 0.0001], ["0.420", "0.000", "<0.001"]),
        ([0.0, 0.0], ["0", "0"]),
        ([9.999, 99.95], ["10.0", "100.0"]),
        ([123456.0, 0.5], ["123456", "<1"]),
    ],
)
def test_figures_of_a_column_are_alike(values: list[float], words: list[str]) -> None:
    assert alike(values) == words


def test_note_of_several_policies_comes_once_with_their_names() -> None:
    report = whole_report()
    first, second = (replace(report.results[0], request=PolicyRequest(name)) for name in ("fiddler", "daop"))
    noted = [
        replace(first, notes=["fiddler: other text", "both alike"]),
        replace(second, notes=["daop: other text", "both alike", "daop: its own"]),
    ]
    text = replace(report, results=noted, left_out=()).render()
    assert [line for line in text.splitlines() if line.startswith("note: ")] == [
        "note: fiddler, daop: other text",
        "note: both alike",
        "note: daop: its own",
    ]


def test_random_routing_is_named() -> None:
    """Hits of a model with random weights are no property of the model whose shape it has."""
    report = whole_report()
    assert "random weights" not in report.render()
    assert report.to_json()["notes"] == []
    shape = replace(report, config=report.config | {"model": "shape:mixtral-8x7b/4"})
    assert "note: random weights route at random" in shape.render()
    assert len(shape.to_json()["notes"]) == 1


def test_json_holds_the_profile_of_each_policy() -> None:
    exact, approximate = whole_report().to_json()["policies"]
    for policy in (exact, approximate):
        profile = policy["decode"]
        assert profile["hit_rate"] == 0.5
        assert profile["hit_rate_by_layer"] == [0.0, 0.5, 1.0]
        tiles = {"demanded": 5, "predicted": 2, "useful": 1.2, "late": 0.5, "wasted": 0.6, "placed": 3}
        assert profile["bytes_per_token"] == pytest.approx({kind: n * TILE for kind, n in tiles.items()})
        assert profile["shares"]["link"] == pytest.approx(0.5)
        assert sum(profile["shares"].values()) == pytest.approx(1)
    assert exact["decode"]["perplexity"] is None
    assert exact["decode"]["fidelity"]["exact"] is True
    assert approximate["decode"]["fidelity"]["stale"] == pytest.approx(0.25)
    assert approximate["decode"]["perplexity"]["difference_percent"] == pytest.approx(2.5)


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_is_written_whole(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"bench.{suffix}"
    draw(whole_report(), path)
    assert path.read_bytes().startswith(begins)
    assert path.stat().st_size > 5000
    assert os.listdir(tmp_path) == [path.name]


def test_plot_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "bench.png").mkdir()
    with pytest.raises(OutputFailed, match="Is a directory"):
        draw(whole_report(), tmp_path / "bench.png")
    assert os.listdir(tmp_path) == ["bench.png"]
