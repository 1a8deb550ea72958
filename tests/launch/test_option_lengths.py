"""Texts of options have limits, so that every child can be given its configuration, at a restart too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.command_line.checks import check_engine, check_reads_text
from launch.command_line.options import MAX_VALUE, parse
from launch.errors import WrongUsage
from launch.hub import model_folder
from launch.processes.children import PIPE_CAPACITY
from launch.processes.cores import Cores
from launch.processes.supervisor import ChildConfigs
from pipeline.checkpoint.index import INDEX_FILE
from pipeline.config import EngineConfig, ResolvedConfig
from pipeline.errors import ModelError, PolicyError
from pipeline.policies import options as policy_options
from pipeline.policies.presets import PRESETS, canonical, make_policy
from pipeline.policies.view import PolicyRequest
from workers.lifetime import pack_config

LONG = "a" * 70_000


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--model", LONG),
        ("serve", "--name", LONG),
        ("serve", "--policy", "fiddler", "--set", f"gate={LONG}"),
        ("serve", "--tile", LONG),
        ("serve", f"--{LONG}"),
        ("serve", "--costs", f"{LONG}/x", "--record", LONG),
    ],
)
def test_long_options_are_refused_in_a_short_line(words: tuple[str, ...]) -> None:
    with pytest.raises(WrongUsage) as failure:
        parse(list(words))
    assert len(str(failure.value)) < 1500


def test_prompts_may_be_long() -> None:
    options = parse(["generate", LONG, "--chat", "--system", LONG])
    assert (options.written["prompt"], options.written["system"]) == (LONG, LONG)


@pytest.mark.parametrize(
    ("policy", "option", "text"),
    [("random", "seed", " " * 70_000 + "7"), ("adapmoe", "threshold", "0.5" + "0" * 70_000)],
)
def test_long_values_of_a_policy_are_refused(policy: str, option: str, text: str) -> None:
    with pytest.raises(PolicyError, match=f"^policy {policy}: {option}=.*too long") as failure:
        make_policy(PolicyRequest(policy, {option: text}), 0)
    assert len(str(failure.value)) < 200


def test_values_are_kept_as_they_were_read() -> None:
    given = PolicyRequest("adapmoe", {"threshold": "0.10", "gate": "adaptive", "depth": " 02"})
    kept = canonical(given, 0)
    assert kept.options == {"threshold": "0.1", "gate": "adaptive", "depth": "2"}
    assert canonical(kept, 0) == kept
    with pytest.raises(PolicyError, match="unknown policy"):
        canonical(PolicyRequest("x"), 0)


def test_the_longest_configuration_fits_a_childs_pipe() -> None:
    path = Path(f"/{'x' * (MAX_VALUE - 1)}")
    most = max(len(preset.options) for preset in PRESETS.values())
    config = EngineConfig(
        model=path,
        name="n" * 32,
        policy="mixtral-offloading",
        policy_options={str(i) * 32: "\u3000" * policy_options.MAX_VALUE for i in range(2 * most)},
        costs=path,
        record=path,
        http_keys=path,
    )
    runtime = cast(Any, SimpleNamespace(name="n" * 32, path=Path(f"/{'x' * 100}")))
    configs = ChildConfigs(
        ResolvedConfig(**vars(config)), path, Cores.here(), runtime, True, 1 << 40, "WARNING", path, b"k" * 32
    )
    packed = pack_config(configs.make("coordinator"))
    assert len(packed) < PIPE_CAPACITY - 1000  # its identity


def test_names_that_no_file_can_have_are_one_line(tiny_model: Path, tmp_path: Path) -> None:
    name = Path("a" * 300)
    assert model_folder(name, download=False) == name
    check_reads_text(name)
    with pytest.raises(ModelError, match=r"File name too long$"):
        check_engine(EngineConfig(model=name))
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": f"{name}.safetensors"}}))
    with pytest.raises(ModelError, match="lacks 1 of 1 weight files") as failure:
        check_engine(EngineConfig(model=tmp_path))
    assert "\n" not in str(failure.value)
