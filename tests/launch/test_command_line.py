"""The command line's errors: one line on stderr, exit code 2, nothing on stdout, nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import ROOT, launch

from launch.command_line.options import MAX_VALUE, parse
from launch.command_line.values import MAX_NAME, MOST_NAMES
from launch.errors import WrongUsage
from launch.processes.children import PIPE_CAPACITY
from launch.processes.monitor import MOST_SUSPECTS
from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig, ResolvedConfig
from pipeline.errors import PolicyError
from pipeline.policies import options as policy_options
from pipeline.policies.presets import PRESETS, canonical
from pipeline.policies.view import PolicyRequest
from protocol.messages import Sampling
from workers.lifetime import pack_config

Complaint = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate", ["--prompt", "--prompt-tokens", "needs a prompt"]),
        ("generate --connect hello", ["needs a prompt", "'hello' is taken as the engine's name"]),
        ("generate hello --model some/model.gguf", ["some/model.gguf does not exist"]),
        ("generate --prompt a --prompt-tokens 1", ["--prompt-tokens", "--prompt", "give one"]),
        ("generate --prompt a --policy fidler", ["fidler", "fiddler"]),
        ("generate --prompt a --policy random --set fiddler.seed=1", ["random", "fiddler"]),
        ("generate --prompt a --set random.seed=1", ["--policy"]),
        ("generate --prompt a --tile 96 --format int4", ["--tile 96", "groups of 64", "128"]),
        ("generate --prompt a --model shape:mixtral", ["shape:mixtral", "mixtral-8x7b", "mixtral-8x22b"]),
        ("generate --prompt a --device gpu", ["gpu", "cuda"]),
        ("generate a --device cuda:0,cpu:1GB", ["'cuda:0,cpu:1GB'", "cuda:0,cuda:1", "cpu:24GB,cpu:12GB"]),
        ("generate a --device cuda:1,cuda:1", ["names a device twice"]),
        ("generate a --device " + ",".join(["cpu:1GB"] * 9), ["9 devices are more than 8"]),
        ("generate a --device cpu:2GB,cpu:1GB --link-gbps 4,2,1", ["3 rates for 2 devices"]),
        ("generate a --device cpu:1GB,cpu:1GB --record /tmp/x.trace", ["--record", "one device", "cpu:1GB"]),
        ("calibrate --text README.md --device cpu:1GB,cpu:1GB", ["calibrate needs all layers on one device"]),
        ("advise --device cpu:1GB,cpu:1GB", ["advise needs all layers on one device"]),
        ("generate --prompt a --model /nowhere/model", ["/nowhere/model"]),
        ("genrate --prompt a", ["genrate", "generate"]),
        ("generate --prompt-tokens 1 --chat", ["--chat", "--prompt-tokens"]),
        ("generate --prompt caf\udce9", ["udce9", "UTF-8"]),
        ("score", ["score needs a text: give --text or --tokens"]),
        ("score --text /nowhere/text", ["/nowhere/text"]),
        ("--temperature 1 generate a", ["generate: write the command first, then its options"]),
        ("score --text README.md --temperature 1", ["--temperature", "score"]),
        ("generate --prompt a --connect x --policy fiddler", ["--policy", "--connect"]),
        ("generate --prompt a --connect missing", ["missing"]),
        ("generate --prompt a --connect", ["no engine is running"]),
        ("chat --policy fiddler", ["--policy does not change a running engine", "leave out the word chat"]),
        ("chat", ["no engine is running"]),
        ("cache --prune", ["--older-than", "--to"]),
        ("cache --dry-run", ["--dry-run", "--prune"]),
        ("generate hello --system b", ["--system belongs to --chat (generate --chat)"]),
        ("generate a --model mixtral", ["mixtral does not exist", "ORG/NAME"]),
        ("--temperatur 3", ["'--temperatur'; did you mean --temperature"]),
        ("--prompt a", ["--prompt does not belong to a chat, but to generate"]),
        ("generate a --max_tokens 3", ["did you mean --max-tokens"]),
        ("generate a -x", ["unknown argument '-x'"]),
        ("score README.md", ["unknown argument 'README.md'; `launch.py score --help` lists"]),
        ("doctor --policy fiddler", ["--policy belongs to --model (doctor --model)"]),
        ("bench --replay run.trace --plot a.png", ["--plot belongs to --sweep (bench --replay --sweep)"]),
        ("bench --replay run.trace --workers 2", ["--workers does not belong to bench --replay, which"]),
        ("calibrate --max-loss 3", ["calibrate needs a text", "--text", "--tokens"]),
    ],
)
def test_wrong_usage_is_one_line(arguments: str, words: list[str], complaint: Complaint) -> None:
    line = complaint(*arguments.split())
    for word in words:
        assert word in line


def test_prompt_without_a_command_is_pointed_at_generate(complaint: Complaint) -> None:
    assert "launch.py generate PROMPT" in complaint("What's a list?")


def test_help_is_quick_and_needs_no_engine(tmp_path: Path) -> None:
    before = os.times().children_user
    done = launch("--help", limit=60, cwd=tmp_path)
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert os.times().children_user - before < 1  # 0.2 s of CPU time; importing torch alone takes 1.5 s


def test_supervisor_imports_no_torch() -> None:
    modules = (
        "generate",
        "score",
        "serve",
        "chat.command",
        "stress.command",
        "bench.command",
        "calibrate",
        "doctor.command",
    )
    imports = ", ".join(f"launch.{module}" for module in modules)
    script = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


def test_defaults_are_those_of_the_dataclasses() -> None:
    options = parse(["generate", "--prompt", "a"])
    assert options.config() == EngineConfig()
    assert options.sampling(Sampling()) == Sampling()


def test_words_are_taken_between_options() -> None:
    options = parse("generate --policy random --workers 3 a --seed 7 --set random.churn=1".split())
    assert options.written["prompt"] == "a"
    expected = EngineConfig(policy="random", workers=3, seed=7, policy_options={"churn": "1"})
    assert options.config() == expected
    assert options.sampling(Sampling()) == Sampling(seed=7)


def test_only_bench_takes_several_policies() -> None:
    options = parse("bench --policy random,fiddler --set random.seed=3".split())
    assert options.policies() == [PolicyRequest("random", {"seed": "3"}), PolicyRequest("fiddler")]
    assert options.config().policy == "random"
    assert parse("serve --policy random,fiddler".split()).config().policy == "random,fiddler"  # refused later


def test_set_without_a_policy_name_applies_to_every_policy() -> None:
    options = parse("bench --policy dali,adapmoe --set prediction=next-gate --set dali.window=8".split())
    assert options.policies() == [
        PolicyRequest("dali", {"prediction": "next-gate", "window": "8"}),
        PolicyRequest("adapmoe", {"prediction": "next-gate"}),
    ]
    options = parse("serve --policy dali --set prediction=none --set dali.prediction=residual".split())
    assert options.config().policy_options == {"prediction": "residual"}
    with pytest.raises(WrongUsage, match="--policy as well"):
        parse(["serve", "--set", "prediction=none"]).policies()


def test_seed_of_a_request_is_sent_to_a_running_engine() -> None:
    options = parse(["generate", "--prompt", "a", "--connect", "--seed", "3"])
    assert options.connect
    assert options.connect_name is None
    assert options.sampling(Sampling()).seed == 3


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


def test_values_are_kept_as_they_were_read() -> None:
    given = PolicyRequest("dali", {"sparsity": "0.10", "gate": "own", "window": " 02"})
    kept = canonical(given, 0)
    assert kept.options == {"sparsity": "0.1", "gate": "own", "window": "2"}
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
        served_model_name=("\U0001f600" * MAX_NAME,) * MOST_NAMES,
    )
    engine = Supervisor(config)
    engine._config, engine._key = ResolvedConfig(**vars(config)), b"k" * 32
    engine._runtime = cast(Any, SimpleNamespace(path=Path(f"/{'x' * 100}")))
    suspects = {-(1 << 62) - key: 9 for key in range(MOST_SUSPECTS)}
    engine._monitor = cast(Any, SimpleNamespace(suspects=suspects))
    packed = pack_config(engine._child_config("coordinator"))
    assert len(packed) < PIPE_CAPACITY - 1000  # its identity
