"""`launch.py bench --replay`: its table and JSON, skipped policies, and errors for invalid input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_calibration import plain_calibration
from trace_files import FINGERPRINT, drawn_steps, in_order, make_header, scripted_steps, write_trace

from launch.cli import main
from launch.profile import PhaseProfile
from pipeline.calibration.cost_cache import Record, Setting, keep, processor
from pipeline.calibration.file import NAME, save
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs, shipped_costs
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import Replay
from pipeline.replay.steps import counts_of
from protocol.program import user_folder

HEADER = make_header(ModelShape(layers=4, experts=8, tiles=4, top_k=2))
BEGIN = 11  # steps of a first text, which warms every policy
STEPS = in_order(drawn_steps(HEADER, 3, 10), drawn_steps(HEADER, 12, 30))
TABLE = ("--costs", "daop-table-1")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "run.trace", HEADER, STEPS)


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["bench", "--replay", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def in_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = replayed(capsys, *arguments, "--json")
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def digits(value: Any) -> Any:
    """As printed: figures have four significant digits."""
    return pytest.approx(value, rel=6e-4)


def calibration() -> Calibration:
    """A calibration in the trace's shape."""
    counts = np.random.default_rng(5).integers(1, 99, (4, 8))
    return plain_calibration(
        4,
        8,
        hidden=16,
        accuracy=0.8,
        decode_counts=counts,
        sensitivity=np.linspace(0.1, 1, 4).astype(np.float32),
        first_gate=np.ones((8, 16), np.float32),
    )


def costs_of_this_machine() -> Record:
    costs = Costs((1,), (3.0,), (1.0,), 5.0, 0.5, (2.0,))
    setting = Setting(*processor(), "cpu", FINGERPRINT, "int4", "bf16", (1,), "k", "host slowed by 2")
    return Record(setting, "m", tiles=4, tile_bytes=1000, measured=1.0, costs=costs)


def test_figures_are_those_of_the_replay(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (trace, *TABLE, "--policy", "on-demand,fiddler", "--expert-cache", "0.5")
    report = in_json(capsys, *arguments)
    counts = counts_of(STEPS[:BEGIN], 4, 8)
    first: dict[str, PhaseProfile] = {}
    for name, entry in zip(("on-demand", "fiddler"), report["policies"], strict=True):
        policy = make_policy(PolicyRequest(name), 0)
        costs = Costs.load(Path("daop-table-1"))
        machine = Replay(HEADER, policy, costs, 64, popularity=counts, begin=BEGIN)
        for phase, tree in machine.run(STEPS).measured.items():
            mine, its, layers = PhaseProfile(tree, 1000), entry[phase], tree["layers"]
            relative = mine.tok_s / first.setdefault(phase, mine).tok_s
            assert its["tok_s"] == digits(mine.rows / mine.seconds)
            assert its["ratio"] == digits(relative)
            assert its["tokens"] == mine.rows
            assert its["hit_rate"] == digits(sum(layers["hits"]) / sum(layers["active"]))
            assert its["hit_rate_by_layer"] == digits(np.divide(layers["hits"], layers["active"]))
            assert its["bytes_per_token"]["demanded"] == digits(tree["fetched_tiles"] * 1000 / mine.rows)
            assert its["busy"]["host"] == digits(tree["host_busy_s"] / mine.seconds)
            assert its["waits"]["link"] == digits(mine.causes["link"] / mine.seconds)
        assert entry["exact"]
        assert "assumption" not in entry
    assert report["config"]["cache_tiles"] == 64
    shape = {"layers": 4, "experts": 8, "tiles": 4, "top_k": 2, "tile_bytes": 1000}
    assert {name: report["config"][name] for name in shape} == shape
    _, out, _ = replayed(capsys, *arguments)
    assert "64 of 128 tiles, 64.0 kB" in out
    assert report["config"]["tokens"] == {"prefill": 12, "decode": 30}
    assert report["config"]["warming"] == {"prefill": 3, "decode": 10}
    assert report["policies"][1]["decode"]["ratio"] > 2, "at these costs fetching is far from computing"


@pytest.mark.parametrize("policy", ["fiddler", "dali:prediction=none", "cache", "on-demand"])
def test_every_policy_is_warmed_by_the_first_text_and_placed_without_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """A text that always uses the same two experts, behind one that uses the same and behind one that uses
    two others: what is resident when it begins was learnt before."""
    hits = []
    for before in ([2, 3], [4, 5]):
        texts = (scripted_steps(HEADER, [[used] * 4] * 80) for used in (before, [2, 3]))
        trace = write_trace(tmp_path / f"{before[0]}.trace", HEADER, in_order(*texts))
        report = in_json(capsys, trace, *TABLE, "--policy", policy, "--expert-cache", "0.25")
        assert report["config"]["warming"]["decode"] == 80
        hits.append(report["policies"][0]["decode"]["hit_rate"])
    assert hits[0] == 1
    assert hits[1] < 1


def test_approximate_policies_note_their_assumption(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (trace, *TABLE, "--policy", "all-host,daop")
    wanted = ("--set", "daop.placement=popular", "--set", "daop.first_layer=1")
    _, out, _ = replayed(capsys, *arguments, *wanted)
    assert "replayed on the recorded text" in " ".join(out.split())
    assert re.search(r"^daop +0\.0% +[\d.]+% +[\d.]+% +75", out, re.M)  # predicted
    entry = in_json(capsys, *arguments, *wanted)["policies"][1]
    assert not entry["exact"]
    assert "recorded text" in entry["assumption"]
    assert entry["options"] == {"placement": "popular", "first_layer": "1"}
    assert entry["decode"]["fidelity"]["predicted"] == pytest.approx(0.75, abs=0.02)


def test_every_calibrated_preset_is_replayed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace has no logits of the gate for the next token's first layer, so presets do not get this
    gate."""
    path = user_folder("CACHE") / FINGERPRINT / NAME
    save(path, calibration(), {})
    try:
        report = in_json(capsys, trace, *TABLE)
        names = [entry["name"] for entry in report["policies"]]
        assert names == [name for name in PRESETS if name not in ("random", "floe", "floe-host")]
        left_out = {entry["name"]: entry["reason"] for entry in report["left_out"]}
        assert left_out.keys() == {"floe", "floe-host"}
        told = "needs a format that keeps the up matrices apart"
        assert all(told in reason for reason in left_out.values())
        assert report["config"]["calibrated"]
        other = replace(HEADER, shape=ModelShape(3, 8, 4, 2))
        small = write_trace(trace.with_name("small"), other, drawn_steps(other, 2, 2))
        code, _, err = replayed(capsys, small, *TABLE)
        assert code == 2
        assert "another shape" in err
    finally:
        path.unlink()


def test_named_policy_without_its_inputs_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = replayed(capsys, trace, *TABLE, "--policy", "all-host,daop")
    assert (code, out) == (2, "")
    assert "daop needs a calibration" in err
    near = write_trace(trace.with_name("near"), flat := make_header(HEADER.shape, 0), drawn_steps(flat, 0, 2))
    code, out, err = replayed(capsys, near, *TABLE, "--policy", "mixtral-offloading")
    assert (code, out) == (2, "")
    assert "which is not in the trace" in err


def test_measured_costs_are_used(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = replayed(capsys, trace)
    assert code == 2
    assert "--costs" in err
    assert "daop-table-1" in err
    record = costs_of_this_machine()
    keep(user_folder("CACHE"), record)
    try:
        report = in_json(capsys, trace, "--policy", "all-host")
        assert report["config"]["costs"]["link"] == 5.0
        assert report["config"]["costs"]["of"] == "measured on this machine, cpu (host slowed by 2)"
    finally:
        (user_folder("CACHE") / "costs" / record.setting.name).unlink()


def test_truncated_trace_is_noted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(trace.read_bytes()[:-5])
    code, out, _ = replayed(capsys, trace, *TABLE, "--policy", "all-host")
    assert code == 0
    assert "ends within a step" in out
    assert "12 tokens of prefill, 29 of decode, behind 13 that warm every policy" in " ".join(out.split())


def test_unusable_traces_are_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_trace(trace.with_name("empty"), HEADER, [])
    step = scripted_steps(HEADER, [[[0, 1]] * 4])[0]
    layers = (*step.layers[:2], replace(step.layers[2], logits=None), step.layers[3])
    ahead = write_trace(trace.with_name("ahead"), HEADER, [replace(step, layers=layers)])
    damaged = trace.with_name("damaged")
    damaged.write_bytes(trace.read_bytes()[:-1] + b"?")
    for path, words in (
        (trace.with_name("missing"), "cannot read the trace"),
        (empty, "has no complete step"),
        (ahead, "in step 0 layer 2 was predicted"),
        (damaged, "checksum"),
    ):
        code, out, err = replayed(capsys, path, *TABLE)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--model", "x"), "--model does not belong to bench --replay"),
        (("--rounds", "3"), "--rounds does not belong to bench --replay"),
        (("--connect",), "--connect does not belong to bench --replay"),
        (("--policy", "dahop"), "did you mean daop"),
        (("--policy", "all-host,all-host"), "once is enough"),
        (("--costs", "daop-table-2"), "daop-table-1 can be named"),
        (("--record", "x"), "--record does not belong"),
    ],
)
def test_invalid_options_are_refused(trace: Path, capsys, more: tuple[str, ...], words: str) -> None:
    code, out, err = replayed(capsys, trace, *more)
    assert (code, out) == (2, "")
    assert words in err


def test_shipped_costs_are_used() -> None:
    """DAOP's table I: a block is its other work and two experts; the transfer of an expert takes as long as
    32 blocks on the device."""
    assert shipped_costs() == ["daop-table-1"]
    costs = Costs.load(Path("daop-table-1"))
    one = costs.for_tiles(1)
    device = one.device_at[1]
    assert 2 * device + one.other_at[1] == pytest.approx(1.24e-3, rel=1e-3)
    assert costs.link == pytest.approx(39.87e-3)
    assert costs.round_trip == pytest.approx(2e-5)
    assert one.host_at[1] / device == pytest.approx(8.02 / 1.24, rel=1e-3)
    assert 8 * costs.for_tiles(8).host_at[1] == pytest.approx(one.host_at[1])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["generate", "--prompt", "x"], "it exists already"),
        (["serve"], "it exists already"),
        (["generate", "--prompt", "x", "--connect"], "--record does not change a running engine"),
    ],
)
def test_recording_is_refused_before_an_engine_starts(trace, capsys, words, reason) -> None:
    before = trace.read_bytes()
    assert main([*words, "--record", str(trace)]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""
    assert trace.read_bytes() == before


def test_sweep_has_the_figures_of_separate_replays(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--policy", "all-host,on-demand,on-demand:sizes=even", *TABLE)
    alone = [in_json(capsys, trace, *words, "--expert-cache", share) for share in (0.25, 0.5)]
    picture = tmp_path / "sweep.svg"
    found = in_json(capsys, trace, *words, "--sweep", "cache=0.25,0.5", "--plot", picture)
    assert [point.pop("settings") for point in found["points"]] == [{"cache": 0.25}, {"cache": 0.5}]
    assert found["points"] == alone
    assert b"<svg" in picture.read_bytes()
    code, out, _ = replayed(capsys, trace, *words, "--sweep", "cache=0.25,0.5")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("sizes=even") == 2


def test_drawn_routing_is_replayed_with_the_costs_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("shape:mixtral-8x7b/2", "--costs", "4090-pcie4", "--policy", "on-demand,cache")
    report = in_json(capsys, *arguments, "--expert-cache", "0.5")
    assert report["config"]["model"] == "mixtral-8x7b"
    assert report["config"]["tokens"] == {"prefill": 256, "decode": 128}
    assert report["config"]["warming"] == {"prefill": 128, "decode": 64}
    assert report["config"]["costs"]["of"] == "derived from the rates of 4090-pcie4"
    uploading, on_host = report["policies"]
    assert uploading["decode"]["host_share"] == 0
    assert on_host["decode"]["ratio"] > 1.2
    assert report == in_json(capsys, *arguments, "--expert-cache", "0.5")
    code, _, err = replayed(capsys, "shape:kimi-k2", "--costs", "4090-pcie4")
    assert code == 2
    assert "no locality of its routing is known (known: shape:mixtral-8x7b, " in err
    code, _, err = replayed(capsys, "shape:mixtral-8x7b/2", "--costs", "4090")
    assert code == 2
    assert "cannot read the costs file 4090" in err
