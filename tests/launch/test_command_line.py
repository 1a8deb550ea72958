"""The command line's errors: one line on stderr, exit code 2, nothing on stdout, nothing started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import ROOT, launch

from launch.command_line.checks import without_effect
from launch.command_line.options import parse
from launch.errors import WrongUsage
from pipeline.config import EngineConfig
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.messages import Sampling

Complaint = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate", ["PROMPT", "--prompt", "--file", "--prompt-tokens", "needs a prompt"]),
        ("generate --connect hello", ["needs a prompt", "'hello' is taken as the engine's name"]),
        ("generate hello --file /tmp/x", ["--file", "second prompt"]),
        ("generate --file /nowhere/prompt", ["/nowhere/prompt"]),
        ("generate hello --model some/model.gguf", ["--model", "GGUF", "safetensors"]),
        ("generate hello --top-k 3", ["--top-k", "greedy"]),
        ("score --text README.md --stride 0", ["--stride", "at least 1"]),
        ("generate --prompt a --prompt-tokens 1", ["--prompt-tokens", "--prompt", "give one"]),
        ("generate --prompt a --max-tokens 0", ["--max-tokens", "at least 1"]),
        ("generate --prompt a --policy fidler", ["fidler", "fiddler"]),
        ("generate --prompt a --policy random --set random.sed=1", ["sed", "seed"]),
        ("generate --prompt a --policy random --set random.seed=x", ["random", "seed", "x"]),
        ("generate --prompt a --policy random --set fiddler.seed=1", ["random", "fiddler"]),
        ("generate --prompt a --policy random --set seed", ["random.option=value"]),
        ("generate --prompt a --set random.seed=1", ["--policy"]),
        ("generate --prompt a --policy daop --set prediction=none", ["daop", "prediction", "one algorithm"]),
        ("generate --prompt a --policy dali --set replacment=lru", ["dali", "replacment", "replacement"]),
        ("generate --prompt a --policy all-host --set prediction=next-gate", ["assignment=host"]),
        ("generate --prompt a --expert-cache 1.5", ["--expert-cache", "between 0 and 1"]),
        ("generate --prompt a --tile 96 --format int4", ["--tile 96", "groups of 64", "128"]),
        ("generate --prompt a --model shape:mixtral", ["shape:mixtral", "mixtral-8x7b", "mixtral-8x22b"]),
        ("bench --model shape:mixtral-8x7b/99", ["shape:mixtral-8x7b/N", "1 to 32"]),
        ("generate --prompt a --model ./shape:mixtral-8x7b", ["does not exist"]),
        ("generate --prompt a --device gpu", ["gpu", "auto, cpu, cuda"]),
        ("generate --prompt a --format int3", ["int3", "bf16"]),
        ("generate --prompt a --temperature -1", ["--temperature", "at least 0"]),
        ("generate --prompt a --top-p 0", ["--top-p", "above 0"]),
        ("generate --prompt a --host-slowdown 0.5", ["--host-slowdown"]),
        ("generate --prompt a --link-gbps 0", ["--link-gbps"]),
        ("generate --prompt a --costs /nowhere/costs.json", ["/nowhere/costs.json"]),
        ("generate --prompt a --model /nowhere/model", ["/nowhere/model"]),
        ("generate --prompt a --name a/b", ["--name"]),
        ("generate --prompt a --tepmerature 1", ["--tepmerature", "--temperature"]),
        ("genrate --prompt a", ["genrate", "generate"]),
        ("generate --prompt-tokens 1 --chat", ["--chat", "--prompt-tokens"]),
        ("generate --prompt a --top-p 0.5 --temperature 0", ["--top-p", "--temperature"]),
        ("--min-p 0.5 --temperature 0", ["--min-p", "--temperature"]),
        ("generate --prompt caf\udce9", ["udce9", "UTF-8"]),
        ("generate --prompt a --model /caf\udce9", ["udce9", "UTF-8"]),
        ("score", ["score needs a text: give --text or --tokens"]),
        ("score --text /nowhere/text", ["/nowhere/text"]),
        ("score --tokens /nowhere/ids.json", ["/nowhere/ids.json"]),
        ("score --text README.md --out /nowhere/a.npy", ["/nowhere/a.npy"]),
        ("score --text README.md --out /proc/a.npy", ["/proc/a.npy"]),
        ("score --text README.md --prefill 3", ["--stepwise"]),
        ("--temperature 1 score --text README.md", ["--temperature", "score"]),
        ("generate --prompt a --connect x --policy fiddler", ["--policy", "--connect"]),
        ("generate --prompt a --connect x --expert-cache 0.5", ["--expert-cache", "--connect"]),
        ("generate --prompt a --connect missing", ["missing"]),
        ("generate --prompt a --connect", ["no engine is running"]),
        ("serve --connect", ["serve"]),
        ("chat --policy fiddler", ["--policy does not change a running engine", "leave out the word chat"]),
        ("chat", ["no engine is running"]),
        ("stress --max-tokens 5", ["--max-tokens"]),
        ("generate hello --detail", ["--detail belongs to --json"]),
        ("bench --replay run.trace --detail", ["--detail belongs to --json"]),
        ("bench --gen-len 1", ["--gen-len", "at least 2"]),
        ("bench --policy all-host --set fiddler.x=1", ["all-host", "fiddler"]),
        ("cache --policy a,b", ["--policy", "cache"]),
        ("cache --prune", ["--older-than", "--to"]),
        ("cache --prune --to 5XB", ["--to", "5XB"]),
        ("cache --dry-run", ["--dry-run", "--prune"]),
        ("generate hello --system b", ["--system belongs to --chat (generate --chat)"]),
        ("generate a --model mixtral", ["mixtral does not exist", "ORG/NAME"]),
        ("--temperatur 3", ["'--temperatur'; did you mean --temperature?"]),
        ("--prompt a", ["--prompt does not belong to a chat, but to generate"]),
        ("generate a --max_tokens 3", ["did you mean --max-tokens?"]),
        ("generate a -x", ["unknown argument '-x'; `launch.py --help`"]),
        ("score README.md", ["unknown argument 'README.md'; `launch.py score --help` lists"]),
        ("generate a -n 100", ["unknown argument '-n'"]),
        ("doctor --policy fiddler", ["--policy belongs to --model (doctor --model)"]),
        ("bench --replay run.trace --plot a.png", ["--plot belongs to --sweep (bench --replay --sweep)"]),
        ("bench --replay run.trace --workers 2", ["--workers does not belong to bench --replay, which"]),
        ("calibrate --max-loss 3", ["calibrate needs a text", "--text", "--tokens"]),
        ("calibrate --report figures --seed 3", ["--seed", "calibrate --report without --text"]),
        ("serve --http-keys keys", ["--http-keys belongs to --http (serve --http)"]),
        ("stress --chaos-rate 3", ["--chaos-rate belongs to --chaos (stress --chaos)"]),
    ],
)
def test_wrong_usage_is_one_line(arguments: str, words: list[str], complaint: Complaint) -> None:
    line = complaint(*arguments.split())
    for word in words:
        assert word in line


@pytest.mark.parametrize("prompt", ["What is a list?", "What's a list?"])
def test_prompt_without_a_command_is_pointed_at_generate(prompt: str, complaint: Complaint) -> None:
    line = complaint(prompt)
    assert prompt in line
    assert "launch.py generate PROMPT" in line


def test_process_exits_with_2_and_one_line(tmp_path: Path) -> None:
    done = launch("generate", "--prompt", "a", "--policy", "fidler", limit=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch.py: ")
    assert done.stderr.count("\n") == 1


def test_a_model_of_an_unknown_architecture(tmp_path: Path, tiny_model: Path, complaint: Complaint) -> None:
    config = json.loads((tiny_model / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    line = complaint("generate", "--prompt-tokens", "1", "--model", str(tmp_path))
    assert "mamba" in line
    assert "mixtral" in line


def test_a_half_downloaded_model(tmp_path: Path, tiny_model: Path, complaint: Complaint) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    whole = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert str(tmp_path) in complaint("generate", "--prompt", "a", "--model", str(tmp_path))


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


@pytest.mark.parametrize(
    ("words", "level"), [("", "NOTICE"), ("-v", "INFO"), ("-v --log-level debug", "DEBUG")]
)
def test_log_level_has_a_short_form(words: str, level: str) -> None:
    options = parse([*words.split(), "doctor"])
    assert options.log_level == level
    assert options.written.keys() <= {"log_level"}


def test_options_are_taken_before_and_after_the_command() -> None:
    options = parse("--policy random --workers 3 generate --prompt a --seed 7 --set random.churn=1".split())
    expected = EngineConfig(policy="random", workers=3, seed=7, policy_options={"churn": "1"})
    assert options.config() == expected
    assert options.sampling(Sampling()) == Sampling(seed=7)


def test_options_without_effect_are_reported(tiny_model: Path) -> None:
    all_host, on_demand = (make_policy(PolicyRequest(name), 0) for name in ("all-host", "on-demand"))
    shared = make_policy(PolicyRequest("on-demand", {"assignment": "cheaper"}), 0)
    for policy, config, words in (
        (
            all_host,
            EngineConfig(expert_cache=0.5),
            ["--expert-cache", "all-host", "--policy layerwise"],
        ),
        (all_host, EngineConfig(link_gbps=5.0), ["--link-gbps", "all-host"]),
        (all_host, EngineConfig(prefetcher="thread"), ["--prefetcher", "all-host"]),
        (all_host, EngineConfig(landings="messages"), ["--landings", "all-host"]),
        (on_demand, EngineConfig(landings="messages", device="cpu"), ["--landings", "device cpu"]),
        (all_host, EngineConfig(landings="messages", device="cpu"), ["--landings", "all-host"]),
        (all_host, EngineConfig(costs=Path("costs.json")), ["--costs", "all-host"]),
        (on_demand, EngineConfig(host_slowdown=2.0), ["--host-slowdown", "on-demand"]),
        (on_demand, EngineConfig(exchange="shm", workers=0), ["--exchange", "--workers 0"]),
        (on_demand, EngineConfig(tile=97), ["--tile 97", "96"]),
        (on_demand, EngineConfig(tile=256, format="int4"), ["--tile 256", "128"]),
    ):
        (line,) = without_effect(config, policy, tiny_model)
        for word in words:
            assert word in line
    assert without_effect(EngineConfig(tile=96, host_slowdown=2.0), all_host, tiny_model) == []
    used = EngineConfig(expert_cache=0.5, link_gbps=5.0, prefetcher="thread")
    assert without_effect(used, on_demand, tiny_model) == []
    assert without_effect(EngineConfig(landings="messages", device="cuda"), on_demand, tiny_model) == []
    used = EngineConfig(host_slowdown=2.0, costs=Path("costs.json"))
    assert without_effect(used, shared, tiny_model) == []


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
