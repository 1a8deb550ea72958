"""`bench --sweep`: its grammar, the order of its settings, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_bench_command import StandInEngine

from launch.bench import command
from launch.bench.measure import Run
from launch.bench.plan import comparisons
from launch.command_line.options import Options, parse
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from pipeline.policies.view import PolicyRequest
from protocol.errors import EngineGone
from protocol.messages import Done

SHORT = {"prompt": ("--prompt-len", "100"), "gen": ("--gen-len", "4")}  # unless they are swept


class Engines:
    """The engines that a sweep starts, and all of their runs."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.engines: list[StandInEngine] = []
        self.runs = 0
        self.error: BaseException = asyncio.CancelledError()
        self.error_at = 0

    @asynccontextmanager
    async def connected(self, options: Options, _: object) -> AsyncIterator[StandInEngine]:
        self.started.append(options.written)
        self.engines.append(StandInEngine())
        self.engines[-1].kv_tokens = options.written.get("kv_tokens", 2048)
        yield self.engines[-1]

    async def measure(self, client: StandInEngine, prompts: Any, gen_len: int) -> tuple[Run, list[Done]]:
        self.runs += 1
        if self.runs == self.error_at:
            raise self.error
        return await client.measure(prompts, gen_len)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(command, "connected", engines.connected)
    monkeypatch.setattr(command, "measure", engines.measure)
    return engines


async def swept(*words: str, plot: Path | None = None) -> None:
    line = ["bench", "--device", "cpu", "--rounds", "2", *words, *(["--plot", str(plot)] if plot else [])]
    for name, given in SHORT.items():
        line += () if any(word.startswith(name) for word in words) else given
    assert await command.bench(parse(line), Interrupts()) == 0


async def test_settings_are_crossed_and_only_another_cache_starts_an_engine(
    engines: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "sweep.png"
    words = ("--policy", "all-host,dali", "--sweep", "batch=1,20", "--sweep", "cache=0.25,0.5")
    await swept(*words, "--sweep", "dali.window=2,4", "--json", plot=picture)
    found = json.loads(capsys.readouterr().out)
    assert [point["settings"] for point in found["points"]] == [
        {"cache": cache, "batch": batch} for cache in (0.25, 0.5) for batch in (1, 20)
    ]
    assert found["sweep"]["dali.window"] == ["2", "4"]
    for point in found["points"]:
        named = [(policy["name"], policy["options"]) for policy in point["policies"]]
        assert named == [("all-host", {}), ("dali", {"window": "2"}), ("dali", {"window": "4"})]
        assert point["config"]["batch"] == point["settings"]["batch"]
        assert [len(policy["decode_tok_s"]["runs"]) for policy in point["policies"]] == [2, 2, 2]
    assert [written["expert_cache"] for written in engines.started] == [0.25, 0.5]
    for written in engines.started:  # one size for both batches
        assert written["max_sequences"] == 20
        assert written["kv_tokens"] == 20 * 128
    assert engines.runs == 4 * 3 * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), EngineGone("the engine has ended")])
async def test_failure_and_interruption_keep_the_finished_settings(
    engines: Engines, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    engines.error, engines.error_at = error, 2 * 3 + 1  # in the third setting
    with pytest.raises(type(error)):
        await swept("--policy", "all-host", "--sweep", "batch=1,2,4", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [point["settings"]["batch"] for point in found["points"]] == [1, 2]
    assert found["interrupted"] is True


async def test_setting_that_does_not_fit_is_left_out_with_the_reason(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    await swept("--policy", "all-host,fiddler", "--sweep", "prompt=50,500", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [point["settings"] for point in found["points"]] == [{"prompt": 50}]
    (missing,) = found["left_out"]
    assert missing["settings"] == {"prompt": 500}
    assert "context is 256" in missing["reason"]


async def test_table_has_a_row_for_each_policy_and_setting(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    await swept("--policy", "mixtral-offloading,all-host", "--sweep", "gen=4,8", "--sweep", "batch=1,16")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("mixtral-offloading") == 4
    assert "2 rounds, policies interleaved: median, and below it the range" in text
    assert "warm-up" not in text  # it differs between the settings


def test_policy_may_come_several_times_with_other_options() -> None:
    line = "bench --policy dali,dali:prediction=none:window=8,fiddler --set dali.window=2"
    assert parse(line.split()).policies() == [
        PolicyRequest("dali", {"window": "2"}),
        PolicyRequest("dali", {"window": "8", "prediction": "none"}),
        PolicyRequest("fiddler"),
    ]
    line = "bench --policy on-demand,mixtral-offloading --sweep placement=empty,first-layers"
    assert [request.label for request in parse(line.split()).policies()] == [
        *("on-demand placement=empty", "on-demand placement=first-layers"),
        *("mixtral-offloading placement=empty", "mixtral-offloading placement=first-layers"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sweep batch", "write it as NAME=V1,V2"),
        ("--sweep batch=1,,2", "write it as NAME=V1,V2"),
        ("--sweep bacth=1,2", "did you mean batch"),
        ("--sweep batch=0,1", "must be at least 1"),
        ("--sweep cache=0.5,2", "between 0 and 1"),
        ("--sweep batch=1,2 --sweep batch=4", "given twice"),
        ("--sweep batch=1,2 --batch 4", "--batch is given as well"),
        ("--sweep cache=0,1 --expert-cache 1", "--expert-cache is given as well"),
        ("--sweep cache=0.25,0.5 --connect", "leave out --connect"),
        ("--sweep batch=1,2 --record x", "leave out --record"),
        ("--replay x --sweep batch=1,2", "a trace has one batch"),
        ("--replay x --plot x.png", "--plot belongs to --sweep"),
    ],
)
def test_wrong_sweep_is_one_line(words: str, said: str) -> None:
    with pytest.raises(WrongUsage, match=said) as raised:
        parse(["bench", *words.split()])
    assert "\n" not in str(raised.value)


def test_one_setting_of_a_sweep_is_recorded() -> None:
    [found] = comparisons(parse("bench --policy all-host --sweep batch=64 --gen-len 128 --record x".split()))
    assert found.plan.batch == 64
    assert found.options.written["record"].name == "x"


def test_sweep_of_an_option_needs_its_policy() -> None:
    for words, said in (
        ("--sweep dali.window=1,2", "--policy"),
        ("--policy fiddler --sweep dali.window=1", "not dali"),
        ("--policy dali --sweep window=2,8 --set window=3", "dali.window is given as well"),
        ("--policy dali:window=3,fiddler --sweep dali.window=2,8", "dali.window is given as well"),
        ("--policy dali --sweep window=2,8 --sweep dali.window=3,4", "dali.window is given as well"),
    ):
        with pytest.raises(WrongUsage, match=said):
            parse(["bench", *words.split()]).policies()
