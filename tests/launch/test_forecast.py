"""The doctor's expected tokens a second: the bytes that a token reads, by measured rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.doctor.measure import left_out
from launch.forecast import CONTEXT, MARGIN, Expected, Speeds, by_rates, sizes_of
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig

GB = 1e9
SPEEDS = Speeds(
    memory=25 * GB,
    experts={"bf16": 20 * GB, "int8": 20 * GB, "int4": 20 * GB},
    backbone=10 * GB,
    layer=1e-3,
    load=0.0,
    cores=2,
)
CONFIG = EngineConfig(device="cpu")
SHAPE = Path("shape:mixtral-8x7b/2")


def expected(format: Any, speeds: Speeds = SPEEDS, config: EngineConfig = CONFIG) -> Expected:
    return by_rates(sizes_of(open_model(SHAPE), config, format), speeds, left_out(config))


def test_a_token_reads_its_active_experts_the_backbone_without_its_table_and_the_kv_cache() -> None:
    reads = expected("bf16")
    assert reads.experts == 2 * 2 * 3 * 14336 * 4096 * 2
    attention = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2
    head, small = 32000 * 4096 * 2, reads.backbone - attention - 32000 * 4096 * 2
    assert reads.backbone - small == attention + head
    assert 0 < small < 1e6  # norms and routers
    assert reads.kv == CONTEXT * 2 * 2 * 1024 * 2
    quantized = expected("bf16", config=replace(CONFIG, backbone_dtype="int8"))
    assert 0.5 < quantized.backbone / reads.backbone < 0.6


def test_the_time_of_a_token_is_that_of_its_reads_and_of_its_layers() -> None:
    found = expected("bf16")
    seconds = found.experts / 20e9 + found.backbone / 10e9 + found.kv / 25e9 + 2e-3
    assert found.usual == pytest.approx(1 / seconds)
    assert found.limit == pytest.approx(25e9 / (found.experts + found.backbone + found.kv))
    assert found.to_map()["share_of_limit"] == pytest.approx(found.usual / found.limit)
    assert found.range == pytest.approx((found.usual * (1 - MARGIN), found.usual * (1 + MARGIN)))
    assert expected("bf16", replace(SPEEDS, layer=5e-3)).usual == pytest.approx(1 / (seconds + 8e-3))


def test_floe_formats_are_expected_without_the_channels_that_are_left_out() -> None:
    """Of 2.5 bits of up and 9 of gate and down; the policy's share, or that of floe-host."""
    numbers, speeds = 2 * 2 * 14336 * 4096, replace(SPEEDS, experts=SPEEDS.experts | {"floe-int4": 20 * GB})
    for changes, share in (
        ({}, 0.8),
        ({"policy": "all-host"}, 0.8),
        ({"policy": "all-host", "policy_options": {"sparsity": "0"}}, 0.0),
        ({"policy": "floe-host", "policy_options": {"sparsity": "0.5"}}, 0.5),
        ({"policy": "floe-host", "policy_options": {"sparsity": "auto"}}, 0.8),
    ):
        config: EngineConfig = replace(CONFIG, **changes)  # type: ignore[arg-type]
        found = expected("floe-int4", speeds, config)
        assert found.experts == pytest.approx(numbers * (2.5 + (1 - share) * 9) / 8, rel=1e-6)
    assert expected("int4").experts == numbers * 13.5 / 8


def test_the_doctor_measures_and_expects(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.doctor.measure.SECONDS", 0.05)  # of each measurement
    assert main(["doctor", "--model", str(tiny_model), "--device", "cpu", "--workers", "1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    speeds = report["speeds"]
    assert min(speeds["memory_gbps"], speeds["backbone_gbps"], *speeds["expert_kernels_gbps"].values()) > 0
    assert [row["format"] for row in report["formats"]] == list(speeds["expert_kernels_gbps"])
    assert max(speeds["backbone_gbps"], *speeds["expert_kernels_gbps"].values()) <= speeds["memory_gbps"]
    for row in report["formats"]:
        found = row["expected"]
        low, high = found["tok_s_range"]
        assert 0 < low < found["tok_s"] <= high <= found["memory_limit_tok_s"]
        assert found["bytes_per_token"]["experts"] > 0
