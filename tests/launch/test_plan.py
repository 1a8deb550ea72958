"""The memory plan on the command line: refusals, reasons, `doctor --model`, the start of an engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from launch import planning
from launch.cli import main
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.planning import (
    Situation,
    every_format,
    formats,
    make_plan,
    memory_lines,
    reasons,
    refusal,
    situation,
    start_line,
)
from pipeline.checkpoint.model_source import OwnMatrix
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig, ResolvedConfig
from pipeline.errors import UsageError
from pipeline.memory.plan import AUTOMATIC, Machine

GB = 10**9
HUGE = "shape:qwen3-235b-a22b"  # with --format f32 it fits no machine that tests run on
Finds = pytest.CaptureFixture[str]


def now(machine: Machine, **asked: Any) -> Situation:
    """On another machine than this one."""
    device = "cpu" if machine.gpu is None else "cuda"
    here = situation(replace(EngineConfig(**asked), device="cpu"), 4)
    return replace(here, config=replace(here.config, device=device), machine=machine)


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"GB": 1e9, "MB": 1e6}[unit]


@given(
    st.sampled_from(("mixtral-8x7b", "deepseek-v2-lite")),
    st.sampled_from((None, "f32", *AUTOMATIC)),
    st.integers(3, 40),
    st.integers(1, 40),
    st.none() | st.integers(2, 8),
    st.sampled_from(("all-host", "fiddler")),
    st.sampled_from((None, 0.5)),
)
def test_the_numbers_of_a_refusal_add_up_and_its_advice_is_good(
    shape: str, format: Any, memory: int, shm: int, gpu: int | None, policy: str, share: float | None
) -> None:
    model = Path(f"shape:{shape}")
    machine = Machine(memory * GB, shm * GB, None if gpu is None else gpu * GB)
    asked = now(machine, model=model, format=format, policy=policy, expert_cache=share)
    try:
        make_plan(model, asked)
    except UsageError as e:
        line = str(e)
    else:
        return
    assert "\n" not in line
    found = re.search(
        r"it needs ([\d.]+ .B) of ([/\w ]+), and ([\d.]+ .B) is available \((.*?)\): (.*)", line
    )
    assert found is not None, line
    needed, name, there, parts, advice = found.groups()
    there_is = {"memory": memory, "/dev/shm": shm, "GPU memory": gpu}[name]
    assert there_is is not None
    assert size(there) == there_is * GB < size(needed)
    listed = sum(size(words) for words in re.findall(r"[\d.]+ [GM]B", parts))
    assert listed == pytest.approx(size(needed), abs=0.03 * GB)  # each is rounded to what is shown
    if use := re.search(r"use (--[^;(]*) \(at least ([^)]*)\)", advice):
        options = parse(["serve", *use[1].split()]).written
        better = replace(asked, config=replace(asked.config, **options))
        plan, _ = make_plan(model, better)
        assert plan.fits(machine)
        assert size(use[2]) <= there_is * GB * 1.001


def test_refusal_names_options_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path("shape:mixtral-8x7b")
    machine = Machine(40 * GB, 39 * GB)
    monkeypatch.setattr(planning, "free_on_disk", lambda path: 20 * GB)  # less than all experts
    for asked, words in (
        ({"format": "bf16"}, "use --format int4"),
        ({"format": "int4", "context": 32768, "kv_tokens": 100_000}, "use --kv-dtype int8 "),
        ({"policy": "fiddler", "expert_cache": 0.9}, "use --expert-cache 0.2"),
        ({"format": "int8", "context": 32768, "kv_tokens": 100_000}, "use --format int4"),
        ({"backbone_dtype": "f32", "context": 32768}, "use --backbone-dtype bf16"),
    ):
        with pytest.raises(UsageError) as refused:
            make_plan(model, now(machine, model=model, **asked))
        assert words in str(refused.value)
    for machine, words in (
        (Machine(31 * GB, 31 * GB), "use --backbone-dtype int8"),
        (Machine(20 * GB, 20 * GB), "close other programs"),
        (Machine(20 * GB, 20 * GB, total=25 * GB), ": use a smaller model or a machine with more memory"),
        (Machine(200 * GB, 10 * GB), "enlarge it: sudo mount -o remount,size="),
    ):
        with pytest.raises(UsageError) as refused:
            make_plan(model, now(machine, model=model, backbone_dtype="f32"))
        assert words in str(refused.value)


def test_a_model_larger_than_memory_has_the_rest_of_its_experts_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Path("shape:mixtral-8x7b")
    monkeypatch.setattr(planning, "free_on_disk", lambda path: 30 * GB)
    small = Machine(20 * GB, 20 * GB)
    plan, lines = make_plan(model, now(small, model=model))
    assert plan.needs.format == "int4-g128"
    assert plan.fits(small)
    assert 10 * GB < plan.needs.store == plan.resolved(EngineConfig()).host_memory < 18 * GB
    assert any(
        line.startswith("--host-memory") and "are in memory, the others are read" in line for line in lines
    )
    assert f"{plan.needs.store / GB:.2f} GB of " in start_line(model, plan, small, "bf16")
    copies, _ = make_plan(model, now(small, model=model, policy="fiddler"))
    assert copies.needs.partial
    assert copies.slab
    assert copies.fits(small)
    with pytest.raises(UsageError):
        make_plan(model, now(Machine(200 * GB, 10 * GB), model=model))
    given, _ = make_plan(
        model, now(Machine(100 * GB, 100 * GB), model=model, format="int4", host_memory=50 * GB)
    )
    assert not given.needs.partial
    assert given.resolved(EngineConfig()).host_memory is None


def test_each_choice_other_than_the_default_has_a_reason() -> None:
    model = Path("shape:mixtral-8x7b")
    source = open_model(model)

    def why(machine: Machine, **asked: Any) -> list[str]:
        return make_plan(model, now(machine, model=model, **asked))[1]

    assert why(Machine(200 * GB, 200 * GB)) == [
        "memory: experts 90.19 GB (bf16), KV cache 4.29 GB (32768 tokens in bf16), backbone 3.22 GB,"
        " processes 1.36 GB; 200.00 GB available"
    ]
    memory, line = why(Machine(200 * GB, 200 * GB), kv_dtype="int8")
    assert "KV cache 2.21 GB (32768 tokens in int8)" in memory
    assert line == "--kv-dtype int8: keys and values are rounded, so answers are approximate"
    _, line = why(Machine(64 * GB, 32 * GB))
    assert line == "--format int4: int8 needs 46.51 GB of /dev/shm, and 32.00 GB is available"
    line = why(Machine(100 * GB, 95 * GB))[-1]
    assert re.fullmatch(r"--kv-tokens \d+: \d\.\d contexts at once; more does not fit", line)
    line = why(Machine(31 * GB, 31 * GB), format="int4-g128")[-1]
    assert re.fullmatch(r"--context \d+: more does not fit", line)
    line = why(Machine(200 * GB, 200 * GB, 24 * GB), policy="fiddler")[-1]
    assert re.fullmatch(r"--expert-cache 0\.\d+: more experts do not fit", line)
    # What was asked for needs no reason.
    assert len(why(Machine(200 * GB, 200 * GB), format="int4", context=100, kv_tokens=100)) == 1
    there = now(Machine(200 * GB, 10 * GB), model=model, format="int4")
    (needed,) = every_format(source, there.config, formats(there.config, source))
    attached = replace(needed, present=needed.store)
    plan = there.plan(there.config, [attached])
    assert plan is not None
    assert (
        "memory: no experts (25.37 GB in int4 exist already), KV cache"
        in memory_lines(plan, there.machine)[0]
    )
    assert reasons(plan, there, [attached]) == []
    assert "it needs 25.37 GB of /dev/shm" in refusal(source, there, [needed])


# --- doctor --model -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_speeds")
def test_doctor_reports_the_chosen_plan_as_json(tiny_model: Path, capfd: Finds) -> None:
    options = ["--format", "f32", "--policy", "fiddler", "--context", "100", "--device", "cpu"]
    assert main(["doctor", "--model", str(tiny_model), *options, "--json"]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert err == ""
    assert out.count("\n") == 1
    assert report["fits"] is True
    assert report["chosen"] == {"format": "f32", "context": 100, "kv_tokens": 400, "expert_cache": 0.25}
    assert [row["format"] for row in report["formats"]] == ["f32", *AUTOMATIC]
    for row in report["formats"]:
        for pool in row["memory"]:
            assert sum(pool["parts"].values()) == pool["needed"]
            assert (pool["needed"] <= pool["there"]) or not row["fits"]
    sizes = [row["store_bytes"] for row in report["formats"]]
    assert sizes[0] > sizes[1]


@pytest.mark.usefixtures("known_speeds")
def test_the_doctor_plans_with_a_config_alone(tiny_model: Path, tmp_path: Path, capfd: Finds) -> None:
    reports = []
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    for folder in (tiny_model, tmp_path):
        assert main(["doctor", "--model", str(folder), "--device", "cpu", "--json"]) == 0
        reports.append(json.loads(capfd.readouterr().out))
    whole, alone = reports
    assert [row["expected"] for row in alone["formats"]] == [row["expected"] for row in whole["formats"]]
    assert [row["store_bytes"] for row in alone["formats"]] == pytest.approx(
        [row["store_bytes"] for row in whole["formats"]], rel=0.01
    )
    (tmp_path / "config.json").write_text("{")
    assert main(["doctor", "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "config.json is damaged: it is not valid JSON\n" in capfd.readouterr().err


@pytest.mark.usefixtures("known_speeds")
def test_the_doctor_refuses_what_is_too_large(capfd: Finds) -> None:
    assert main(["doctor", "--model", HUGE, "--format", "f32", "--device", "cpu"]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^ +too large ", out, re.M)
    assert f"{HUGE} does not fit: with --format f32 it needs" in " ".join(out.split())
    assert main(["doctor", "--model", HUGE, "--format", "f32", "--device", "cpu", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["fits"], report["chosen"], len(report["why"])) == (False, None, 1)


@pytest.mark.usefixtures("known_speeds")
def test_the_doctor_has_a_line_for_each_device(tiny_model: Path, capfd: Finds) -> None:
    options = ("--device", "cpu:2GB,cpu:500MB", "--policy", "on-demand", "--format", "bf16")
    assert main(["doctor", "--model", str(tiny_model), *options]) == 0
    out = capfd.readouterr().out
    assert "with --device cpu:2GB,cpu:0.5GB --policy on-demand" in out
    for line in (r"cpu:2GB \(layers 1-1\) +2\.00 GB", r"cpu:0\.5GB \(layers 2-2\) +500\.0 MB"):
        assert re.search(line, out), out


def test_modules_of_transformers_are_not_divided(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "is_own", lambda config: False)
    asked = situation(EngineConfig(model=tiny_model, device="cpu:2000000000,cpu:1000000000"), 4)
    with pytest.raises(UsageError, match=r"^--device cpu:2GB,cpu:1GB: .* give one device$"):
        make_plan(tiny_model, asked)


def test_gpus_are_named_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "DRIVER_NODES", (tmp_path,))
    probe = "import sys; print(2, *(7 + int(word) for word in sys.argv[1:] if int(word) < 2))"
    monkeypatch.setattr(planning, "PROBE", probe)
    cards = EngineConfig(device="cuda:1,cuda:0").cards
    assert planning.usable_device("cuda", cards) == ("cuda", (8, 7))
    with pytest.raises(WrongUsage, match=r"^--device cuda:2: torch sees 2 CUDA devices here"):
        planning.usable_device("cuda", EngineConfig(device="cuda:0,cuda:2").cards)


def test_device_is_the_gpu_where_one_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = tmp_path / "nvidiactl"
    monkeypatch.setattr(planning, "DRIVER_NODES", (tmp_path / "dxg", node))
    for probe, driver, asked, expected in (
        ("print('warning'); print(1, 7)", True, "auto", ("cuda", (7,))),
        ("print(1, 7)", True, "cpu", ("cpu", ())),
        ("print(1, 7)", False, "auto", ("cpu", ())),
        ("print(1, 7)", False, "cuda", None),
        ("print(0)", True, "auto", ("cpu", ())),
        ("print(1, 7); raise SystemExit(1)", True, "auto", ("cpu", ())),
        ("print(0)", True, "cuda", None),
        ("import time; time.sleep(60)", True, "auto", ("cpu", ())),
    ):
        monkeypatch.setattr(planning, "PROBE", probe)
        monkeypatch.setattr(planning, "PROBE_LIMIT", 0.2 if "sleep" in probe else 60)
        node.touch() if driver else node.unlink(missing_ok=True)
        caplog.clear()
        if expected is None:
            with pytest.raises(WrongUsage, match="--device cuda"):
                planning.usable_device(asked)  # type: ignore[arg-type]
        else:
            assert planning.usable_device(asked) == expected  # type: ignore[arg-type]
        warned = driver and asked == "auto" and expected == ("cpu", ())
        assert bool(caplog.messages) is warned


# --- an engine ----------------------------------------------------------------------------------------------


async def test_children_receive_the_chosen_values(start_engine: Any, tiny_model: Path) -> None:
    config = EngineConfig(model=tiny_model, device="cpu", workers=1, kv_tokens=300)
    async with start_engine(config) as (supervisor, client):
        resolved = supervisor.config
        assert isinstance(resolved, ResolvedConfig)
        assert (client.welcome.format, client.welcome.context) == ("bf16", 256)
        stats = await client.stats()
        assert stats["scheduler"]["kv_tokens"] == 320
        await client.set_policy("on-demand", {})
        stats = await client.stats()
        assert stats["cache"]["capacity_tiles"] == 2 * 4 // 4  # of one tile an expert
        await until(lambda: supervisor.config is not resolved)  # the supervisor learns it after the client
        assert supervisor.config == replace(resolved, policy="on-demand")


def test_a_quantized_model_keeps_its_format_where_it_fits() -> None:
    """Else the next one is chosen, and a second rounding said."""
    model = Path("shape:mixtral-8x7b")
    source, there = open_model(model), now(Machine(200 * GB, 200 * GB), model=model)
    source.quantized = "Q6_K"
    assert formats(there.config, source) == ("int8", "int4", "int4-g128")
    source.quantized, source.own_format = "Q8_0", "q8_0"
    asked = formats(there.config, source)
    assert asked == ("q8_0", "int8", "int4", "int4-g128")
    every = every_format(source, there.config, asked)
    plan = there.plan(there.config, every)
    assert plan is not None
    assert plan.needs.format == "q8_0"
    assert reasons(plan, there, every) == []
    less = now(Machine(34 * GB, 34 * GB), model=model)
    plan = less.plan(less.config, every)
    assert plan is not None
    assert plan.needs.format == "int4"
    last = reasons(plan, less, every)[1]
    assert last.startswith("the experts are Q8_0 in the file, kept as int4: a second rounding, which adds ")
    assert "experts int4 (a second rounding, of Q8_0), rest bf16" in start_line(
        model, plan, less.machine, "bf16"
    )
    kinds = {"q_proj": ("q4_0", "Q4_0"), "k_proj": ("q8_0", "Q8_0"), "v_proj": ("q4_0", "Q4_0")}
    source.kinds = {f"model.layers.0.self_attn.{name}.weight": kind for name, (_, kind) in kinds.items()}
    source.own_matrices = {
        f"model.layers.0.self_attn.{name}.weight": OwnMatrix(
            format, (4096 if name == "q_proj" else 1024, 4096)
        )
        for name, (format, _) in kinds.items()
    }
    (again,) = every_format(source, there.config, ["int4"])
    assert again.rest_rounded == ()  # q8_0 has all of the stack
    value, output = (f"model.layers.0.self_attn.{name}.weight" for name in ("v_proj", "o_proj"))
    source.own_matrices |= {value: OwnMatrix("int8", (1024, 4096))}
    source.kinds |= {value: "Q6_K", output: "F16"}
    (again,) = every_format(source, there.config, ["int4"])
    plan = there.plan(there.config, [again])
    assert plan is not None
    assert "rest own (bf16 of F16, int8 of Q4_0, Q6_K, Q8_0)" in start_line(model, plan, less.machine, "own")
    assert [line.partition(":")[0] for line in reasons(plan, there, [again])] == [
        "the experts are Q8_0 in the file, kept as int4",
        "other matrices are F16 in the file, kept as bf16",
        "other matrices are Q4_0, Q6_K, Q8_0 in the file, kept as int8",
    ]
    del source.own_matrices[value]  # not quantized: neither is what it is stacked with
    (again,) = every_format(source, there.config, ["int4"])
    assert [*again.rest_rounded] == [("F16, Q4_0, Q6_K, Q8_0", "bf16")]
