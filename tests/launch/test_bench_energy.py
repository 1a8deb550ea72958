"""`bench --energy`: counters on made trees of /sys, reads by a made clock, joules a token. No engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from counters import decode
from test_bench_command import SHORT, StandInEngine
from test_bench_report import whole_report
from test_bench_run import StandInAnswer, StandInClient

from launch.bench import command, energy, run, sweep
from launch.bench.energy import counting, nvml_counters, rapl_counters
from launch.bench.meter import PERIOD, Meter, PhaseEnergy, open_meter
from launch.bench.plot import draw
from launch.bench.report import Report
from launch.bench.run import Run, measure
from launch.cli import main
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.client import Client
from protocol.messages import Token

RANGE = 262_143_328_850  # microjoules


def zone(root: Path, number: str, name: str, energy: object = 1_000_000) -> Path:
    """The file of its energy."""
    folder = root / "sys/class/powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


# --- RAPL -----------------------------------------------------------------------------------------------


def test_packages_and_their_memory_are_counted_once(tmp_path: Path) -> None:
    """Two sockets, with cores, graphics and psys, which are counted in others or count others."""
    for socket in range(2):
        zone(tmp_path, f"{socket}", f"package-{socket}")
        zone(tmp_path, f"{socket}:0", "core")
        zone(tmp_path, f"{socket}:1", "uncore")
        zone(tmp_path, f"{socket}:2", "dram")
    zone(tmp_path, "2", "psys")
    zone(tmp_path, "2:0", "dram")
    again = zone(tmp_path, "9", "package-0").parent
    again.rename(again.with_name("intel-rapl-mmio:0"))
    counters, unread = rapl_counters(tmp_path)
    assert [(c.part, c.name) for c in counters] == [
        ("cpu", "package-0"),
        ("cpu", "package-1"),
        ("dram", "package-0 dram"),
        ("dram", "package-1 dram"),
    ]
    assert [c.read() for c in counters] == [1.0] * 4
    assert unread == []


def test_amd_and_several_dies_are_packages(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0-die-0")
    zone(tmp_path, "1", "package-0-die-1")
    zone(tmp_path, "0:0", "core")
    counters, _ = rapl_counters(tmp_path)
    assert [c.name for c in counters] == ["package-0-die-0", "package-0-die-1"]


def test_psys_counts_where_no_package_does(tmp_path: Path) -> None:
    zone(tmp_path, "0", "psys")
    counters, unread = rapl_counters(tmp_path)
    assert [(c.part, c.name) for c in counters] == [("system", "psys")]
    assert unread == []


def test_counter_goes_on_after_its_range(tmp_path: Path) -> None:
    file = zone(tmp_path, "0", "package-0", RANGE - 1_000_000)
    ((counter,), _) = rapl_counters(tmp_path)
    before = counter.read()
    for lap in (1, 2):
        file.write_text("3000000\n")
        assert counter.read() - before == pytest.approx(4.0 + (lap - 1) * RANGE / 1e6)
        file.write_text(f"{RANGE - 500_000}\n")
        assert counter.read() - before == pytest.approx(0.5 + lap * RANGE / 1e6)


def test_file_that_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root reads every file, so the refusal is made."""
    shut = [zone(tmp_path, "0", "package-0"), zone(tmp_path, "1", "package-1")]
    zone(tmp_path, "1:0", "dram")
    read_text = Path.read_text

    def refused(path: Path, *words: Any, **named: Any) -> str:
        if path in shut:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *words, **named)

    monkeypatch.setattr(Path, "read_text", refused)
    counters, (line,) = rapl_counters(tmp_path)
    assert [c.name for c in counters] == ["package-1 dram"]
    assert line.startswith(f"{shut[0]}: Permission denied (and 1 more)")
    assert "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj" in line
    assert "\n" not in line


@pytest.mark.parametrize("spoil", [lambda file: file.unlink(), lambda file: file.write_text("much\n")])
def test_file_without_a_number_is_named(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    file = zone(tmp_path, "0", "package-0")
    spoil(file)
    counters, (line,) = rapl_counters(tmp_path)
    assert counters == []
    assert line.startswith(str(file))
    assert "chmod" not in line


def test_machine_without_rapl_is_one_line(tmp_path: Path) -> None:
    for _ in range(2):
        counters, (line,) = rapl_counters(tmp_path)
        assert counters == []
        assert "no RAPL counter" in line
        (tmp_path / "sys/class/powercap/intel-rapl").mkdir(
            parents=True, exist_ok=True
        )  # the module, without a zone


async def test_zone_that_stays_as_it_is_does_not_count(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(energy, "COUNTS_WITHIN", 0.1)
    file = zone(tmp_path, "0", "package-0")
    zone(tmp_path, "0:0", "dram", 0)
    counters, _ = rapl_counters(tmp_path)

    async def work() -> None:
        await asyncio.sleep(0.01)
        file.write_text("1000061\n")

    (found, lines), _ = await asyncio.gather(counting(counters), work())
    assert [c.name for c in found] == ["package-0"]
    assert lines == ["package-0 dram does not count here"]


# --- NVML -----------------------------------------------------------------------------------------------


class StandInNvml(ModuleType):
    """The module pynvml with two GPUs, of which the second is too old for the counter."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.works = True

    def nvmlInit(self) -> None:
        if not self.works:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ["GPU A", "GPU B"][handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle:
            raise RuntimeError("Not Supported")
        return 2500


@pytest.fixture
def with_driver(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


def test_gpus_that_count_are_found(with_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (counter,), (line,) = nvml_counters(with_driver)
    assert (counter.part, counter.name, counter.read()) == ("gpu", "GPU A", 2.5)
    assert "GPU B: Not Supported" in line
    nvml.works = False
    assert nvml_counters(with_driver)[0] == []
    assert "Driver Not Loaded" in nvml_counters(with_driver)[1][0]


def test_missing_library_matters_only_with_a_gpu(
    with_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counters, (line,) = nvml_counters(with_driver)
    assert counters == []
    assert "pip install nvidia-ml-py" in line
    (tmp_path / "dev/nvidiactl").unlink()
    assert nvml_counters(tmp_path) == ([], [])


# --- what is opened -------------------------------------------------------------------------------------


async def test_what_cannot_be_read_is_said_and_the_rest_measured(
    with_driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counted = iter(range(1, 100))
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(counted))
    with caplog.at_level("INFO", "tandem"):
        found = await open_meter(parse(["bench", "--energy"]), with_driver)
    assert found is not None
    assert [c.name for c in found.counters] == ["GPU A", "GPU B"]
    assert "energy: without a counter: no RAPL counter in" in caplog.text
    assert await open_meter(parse(["bench"]), with_driver) is None
    with pytest.raises(WrongUsage, match="no RAPL counter") as raised:  # no GPU is used
        await open_meter(parse(["bench", "--energy", "--device", "cpu"]), with_driver)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("more", [[], ["--sweep", "batch=1,2"]])
def test_nothing_to_read_is_refused_before_an_engine_starts(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("an engine was started")

    for module in (command, sweep):
        monkeypatch.setattr(module, "open_meter", lambda options: open_meter(options, tmp_path))
        monkeypatch.setattr(module, "session", started)
    monkeypatch.setattr(command, "connected", started)
    assert main(["bench", "--energy", "--policy", "all-host", *more]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--energy: no energy counter can be read: no RAPL counter" in err.splitlines()[-1]


def test_energy_of_no_machine_is_refused() -> None:
    with pytest.raises(WrongUsage, match="--energy does not belong to bench --replay"):
        parse(["bench", "--energy", "--replay", "x"])


# --- the reads of a run ---------------------------------------------------------------------------------


class Clock:
    """Time that passes only while the meter waits for its next read; longer sleepers wait for that."""

    def __init__(self) -> None:
        self.now = 100.0
        self._passed = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        if seconds <= PERIOD:
            self.now = until
            self._passed.set()
            self._passed = asyncio.Event()
            await asyncio.sleep(0)
        while self.now < until:
            await self._passed.wait()


class SteppingCounter:
    """Counts at multiples of `step` seconds what `joules` says of the time until then."""

    def __init__(self, part: str, name: str, clock: Clock, step: float, joules: Callable[[float], float]):
        self.part, self.name = part, name
        self._clock, self._step, self._joules = clock, step, joules

    def read(self) -> float:
        return self._joules(self._clock() // self._step * self._step)


def made_meter(clock: Clock, busy: Callable[[float], float], step: float = 0.001) -> Meter:
    """A package of 10 W and `busy` joules on top, and a GPU of 30 W that counts every tenth of a second."""
    counters = [
        SteppingCounter("cpu", "package-0", clock, step, lambda now: 10 * now + busy(now)),
        SteppingCounter("gpu", "GPU A", clock, 0.1, lambda now: 30 * now),
    ]
    return Meter(counters, clock=clock, sleep=clock.sleep)


async def test_idle_power_and_resolution_are_measured() -> None:
    clock = Clock()
    found = made_meter(clock, lambda now: 0.0)
    await found.measure_idle(1.0)
    assert found.idle_watts == pytest.approx([10, 30], rel=0.05)
    assert found.resolution == pytest.approx(0.1, rel=0.2)
    plain = found.to_map()
    assert plain["counters"] == {"cpu": ["package-0"], "gpu": ["GPU A"]}
    assert plain["idle_watts"] == pytest.approx({"cpu": 10, "gpu": 30}, rel=0.05)


async def test_energy_between_two_times_is_interpolated() -> None:
    """5 W more from 0.5 s after the beginning on; a boundary lies between two reads and two steps."""
    clock = Clock()
    began = clock.now
    found = made_meter(clock, lambda now: 5 * max(0.0, now - began - 0.5))
    found.idle_watts = [10.0, 30.0]
    async with found.recording() as recording:
        await clock.sleep(1.5)
    assert recording.times[0] == began
    assert clock.now - began > 1.5  # read on until the slow counter has changed
    spans = {(0.2, 0.4): 0.0, (0.613, 0.913): 1.5, (0.413, 0.613): 0.565, (1.207, 1.207 + 0.25): 1.25}
    for (begin, end), joules in spans.items():
        spent = found.energy(recording, began + begin, began + end, tokens=10)
        assert spent.per_token("cpu") == pytest.approx(joules / 10, abs=0.011)
        assert spent.per_token("gpu") == pytest.approx(0.0, abs=0.06)
        assert spent.joules["gpu"] == pytest.approx(30 * (end - begin), abs=0.6)
        assert spent.seconds == pytest.approx(end - begin)
        assert spent.total_j_token == pytest.approx((joules + 40 * (end - begin)) / 10, abs=0.07)


async def test_counter_that_stops_ends_a_run_with_its_reason() -> None:
    clock = Clock()
    found = made_meter(clock, lambda now: 0.0)

    def gone() -> float:
        if clock.now > 100.45:
            raise OSError(5, "Input/output error", "energy_uj")
        return clock.now

    found.counters[0].read = gone  # type: ignore[method-assign]

    async def run_past_it() -> None:
        async with found.recording():
            await clock.sleep(0.4)
            await asyncio.sleep(0.05)  # the reads go on, and fail in this time or after it

    with pytest.raises(OSError, match="Input/output error"):
        await run_past_it()


# --- joules a token -------------------------------------------------------------------------------------


class TimedAnswer(StandInAnswer):
    """Its first token after a second, and two more after 0.4 s each."""

    clock: Clock

    async def __aiter__(self) -> AsyncIterator[Token]:
        for index in range(self._count):
            await self.clock.sleep(0.4 if index else 1.0)
            yield Token(self.done.request, index, 5, "x")


async def test_joules_a_token_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 W above idle in prefill (1 s), 60 W in decode (0.8 s): 8 prompt tokens, then 4 new ones."""
    clock = Clock()
    sent: list[float] = []

    class TimedClient(StandInClient):
        def generate(self, **fields: Any) -> StandInAnswer:
            sent.append(clock.now)
            answer = TimedAnswer(len(sent), self._tokens, {})
            answer.clock = clock
            return answer

    def busy(now: float) -> float:
        begun = sent[0] if sent else now
        return 20 * min(max(0.0, now - begun), 1.0) + 60 * min(max(0.0, now - begun - 1.0), 0.8)

    found = made_meter(clock, busy)
    monkeypatch.setattr(run.time, "perf_counter", clock)
    await found.measure_idle(1.0)
    measured, _ = await measure(cast(Client, TimedClient(3)), ((1, 2, 3, 4), (5, 6, 7, 8)), 3, found)
    assert set(measured.energy) == {"prefill", "decode"}
    assert [measured.energy[phase].tokens for phase in ("prefill", "decode")] == [8, 4]
    assert measured.prefill_j_token == pytest.approx(20 / 8, rel=0.15)
    assert measured.decode_j_token == pytest.approx(60 * 0.8 / 4, rel=0.1)
    assert measured.energy["decode"].total_j_token == pytest.approx((60 + 40) * 0.8 / 4, rel=0.1)
    monkeypatch.undo()
    without, _ = await measure(cast(Client, StandInClient(3)), ((1, 2, 3, 4), (5, 6, 7, 8)), 3)
    assert without.energy == {}


def phase(tokens: int, seconds: float, *joules: float) -> PhaseEnergy:
    """`joules` of cpu, dram and gpu, of which 8, 2 and 10 W are idle power."""
    parts = ("cpu", "dram", "gpu")
    idle = {part: watts * seconds for part, watts in zip(parts, (8, 2, 10), strict=True)}
    return PhaseEnergy(tokens, seconds, dict(zip(parts, joules, strict=True)), idle)


def energy_report() -> Report:
    report = whole_report()
    rounds = [
        {"prefill": phase(100, 0.05, 5.4, 1.1, 20.5), "decode": phase(10, 2.0, 36.0, 14.0, 40.0)},
        {"prefill": phase(100, 0.05, 7.4, 1.1, 20.5), "decode": phase(10, 2.0, 56.0, 14.0, 40.0)},
    ]
    for i, result in enumerate(report.results):
        scaled = [
            {name: replace(p, joules={k: v * (1 + i) for k, v in p.joules.items()}) for name, p in r.items()}
            for r in rounds
        ]
        result.runs = [replace(r, energy=e) for r, e in zip(result.runs, scaled, strict=True)]
    measured = {
        "counters": {"cpu": ["package-0"], "dram": ["package-0 dram"], "gpu": ["GPU A"]},
        "idle_watts": {"cpu": 8.0, "dram": 2.0, "gpu": 10.0},
        **{"read_every_s": 0.02, "resolution_s": 0.1, "unread": ["package-1: Permission denied"]},
    }
    return replace(report, config=report.config | {"energy": measured})


def test_report_has_joules_a_token(tmp_path: Path) -> None:
    report = energy_report()
    text = report.render()
    assert max(map(len, text.splitlines())) <= 80
    plain = [" ".join(line.split()) for line in text.splitlines()]
    # decode: 36 + 14 + 40 - 40 of idle power in 2 s, and 20 more in the second round
    assert "mixtral-offloading 0.270 6.0 1.00 10.0 3.00 1.00 2.00" in plain
    assert "0.260-0.280 5.0-7.0" in plain
    for words in (
        *(
            "engine loaded and idle: cpu 8.0 W, dram 2.0 W, gpu 10.0 W; with idle: of",
            "package-0, package-0 dram, GPU A",
        ),
        *("read every 20 ms, changed every 100 ms", "note: without a counter: package-1: Permission"),
        "note: prefill took 50 ms, so its joules are coarse; measure longer prompts",
    ):
        assert words in " ".join(text.split())
    assert "decode took" not in text
    first, second = report.to_json()["policies"]
    assert first["energy"]["decode"]["j_token"] == {
        "median": pytest.approx(6.0),
        "min": pytest.approx(5.0),
        "max": pytest.approx(7.0),
        "runs": pytest.approx([5.0, 7.0]),
    }
    assert first["energy"]["decode"]["j_token_by_part"] == pytest.approx(
        {"cpu": 3.0, "dram": 1.0, "gpu": 2.0}
    )
    assert first["energy"]["decode"]["j_token_with_idle"] == pytest.approx(10.0)
    assert first["energy"]["prefill"]["tokens"] == 100
    assert second["energy"]["decode_ratio"] == pytest.approx((14 / 5 + 18 / 7) / 2)
    emulated = " ".join(replace(report, emulation="link paced to 2 GB/s").render().split())
    assert "note: the joules are this machine's" in emulated
    draw(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_no_ratio_to_a_run_that_took_no_more_than_the_idle_machine() -> None:
    report = energy_report()
    first = report.results[0]
    first.runs = [replace(r, energy=r.energy | {"decode": phase(10, 2.0, 16, 4, 19)}) for r in first.runs]
    assert [policy["energy"]["decode_ratio"] for policy in report.to_json()["policies"]] == [None, None]
    text = " ".join(report.render().split())
    assert "-0.10 to -0.10" in text
    assert "note: runs took no more than the idle machine" in text
    assert "no more than the idle machine" not in energy_report().render()


def test_report_without_energy_has_none_of_it() -> None:
    report = whole_report()
    assert "J/token" not in report.render()
    assert all("energy" not in policy for policy in report.to_json()["policies"])


async def test_sweep_and_bench_measure_the_idle_machine_and_every_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clock = Clock()
    made = made_meter(clock, lambda now: 0.0)
    idle: list[str] = []

    async def measure_idle() -> None:
        idle.append("idle")
        made.idle_watts = [10.0, 30.0]

    async def measured(engine: StandInEngine, prompts: Any, gen_len: int, meter: Any = None) -> Any:
        run = Run(1.0, 0.1, 1.0, 0, 0.0, 1.0, decode=decode())
        if meter is not None:
            joules = PhaseEnergy(10, 1.0, {"cpu": 30.0, "gpu": 40.0}, {"cpu": 10.0, "gpu": 30.0})
            run = replace(run, energy={"prefill": joules, "decode": joules})
        return run, []

    @asynccontextmanager
    async def connected(*_: object) -> AsyncIterator[StandInEngine]:
        yield StandInEngine()

    async def opened(options: object) -> Meter:
        return made

    monkeypatch.setattr(made, "measure_idle", measure_idle)
    monkeypatch.setattr(command, "connected", connected)
    for module in (command, sweep):
        monkeypatch.setattr(module, "measure", measured)
        monkeypatch.setattr(module, "open_meter", opened)
    line = ["bench", "--energy", "--device", "cpu", "--policy", "all-host,fiddler", *SHORT]
    assert await command.bench(parse([*line, "--json"]), Interrupts()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [policy["energy"]["decode"]["j_token"]["median"] for policy in found["policies"]] == [3.0, 3.0]
    assert found["config"]["energy"]["idle_watts"] == {"cpu": 10.0, "gpu": 30.0}
    assert idle == ["idle"]
    line += ["--rounds", "1", "--sweep", "cache=0.25,0.5", "--plot", str(tmp_path / "sweep.png")]
    assert await sweep.sweep(parse(line), Interrupts()) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    rows = [row.split() for row in text.splitlines() if "all-host" in row or "fiddler" in row]
    assert [row[-1] for row in rows[:4]] == ["3.00"] * 4
    assert "energy counters: package-0, GPU A" in text
    assert "J/token of decode: less the power of this machine" in text
    assert "with idle" not in text
    assert len(idle) == 3
    assert (tmp_path / "sweep.png").stat().st_size > 5000
