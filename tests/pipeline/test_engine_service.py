"""The engine's thread on a real engine: which events it posts, its policy, its status and its waits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs
from plain_calibration import plain_calibration
from whole_engine import CONTEXT, OPTIONS, TEXT_UP, Inbox, WholeEngine, coordinator_map, whole_engine

from pipeline.calibration.file import calibration_path, save
from pipeline.calibration.heat import NAME
from pipeline.config import CoordinatorConfig
from pipeline.coordinator import run_engine
from pipeline.device.cpu import CpuDevice
from pipeline.errors import CalibrationError, PeerLost, PolicyError, ShardFailed
from pipeline.experts.peers import ExitEvents
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest, Target
from pipeline.serving import engine_service, policy_switch
from pipeline.serving.engine_inbox import (
    EngineFailed,
    EngineInbox,
    EngineReady,
    ToClients,
    ToOtherClients,
    ToSupervisor,
)
from pipeline.serving.engine_service import (
    IDLE_WAIT,
    INBOX_SECONDS,
    MOVING_WAIT,
)
from pipeline.traces.trace import Trace
from protocol.messages import (
    Done,
    Error,
    Generate,
    PolicyChanged,
    Progress,
    SetPolicy,
    Token,
)
from shm.errors import NotEnoughMemory

IDS = (5, 6, 7, 8)
ASKED = Generate(1, token_ids=IDS, max_tokens=3, ignore_eos=True)
ANSWER = [Token, Token, Token, Done]
COSTS = Costs((1,), (1e-4,), (2e-5,), 3e-5, 4e-5, (5e-5,))


@pytest.fixture
def whole(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeEngine]:
    """It takes all waiting messages before the next round."""
    monkeypatch.setattr(engine_service, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with whole_engine(tiny_model, tmp_path) as whole:
        yield whole


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.to_json()))
    return path


def save_calibration(whole: WholeEngine) -> Path:
    path = calibration_path(whole.config.cache, whole.parts.source)
    save(path, plain_calibration(2, 4, hidden=64), {})
    return path


def fails(error: Exception) -> Any:
    """A function that raises this error."""

    def fail(*_: object) -> None:
        raise error

    return fail


def slow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message takes longer than all of them may take between two rounds."""
    clock = itertools.count(0.0, 2 * INBOX_SECONDS)
    monkeypatch.setattr(engine_service, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


# --- requests ---------------------------------------------------------------------------------------------


def test_refused_requests_end_at_once(whole: WholeEngine) -> None:
    """A prompt that is too long with its length; a number in use as an Error, because its Done follows."""
    asked = (
        ASKED,
        structs.replace(ASKED, request=4, max_tokens=0),
        Generate(2, token_ids=(7,) * CONTEXT),
        ASKED,
    )
    empty, too_long, in_use, *answer = whole.serve(*asked)
    assert empty == Done(4, "error", "max_tokens must be at least 1, it is 0", usage=True)
    assert (too_long.request, too_long.reason, too_long.usage) == (2, "error", True)
    assert too_long.stats == {"prompt_tokens": CONTEXT}
    assert too_long.error.endswith("or start the engine with a larger --context")
    assert in_use == Error(1, "request 1 is already being served")
    assert [type(message) for message in answer] == ANSWER


def test_stopped_engine_takes_the_waiting_messages_and_ends_every_request(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where they take longer than messages may take between two rounds."""
    slow_messages(monkeypatch)
    inbox = EngineInbox()
    service = whole.service(inbox)
    for number in range(4):
        inbox.put(b"c", structs.replace(ASKED, request=number))
    inbox.stop()
    service.serve()
    assert [(m.request, m.reason) for m in whole.sent()] == [(n, "cancelled") for n in range(4)]


def test_failing_shard_ends_its_request_and_a_failing_engine_none(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients resume their requests on the restarted engine."""
    pool = whole.parts.engine.pool
    monkeypatch.setattr(pool, "parts", fails(ShardFailed("no")))
    (done,) = whole.serve(ASKED)
    assert (done.reason, done.error, done.usage) == ("error", "no", False)
    whole.events.clear()
    monkeypatch.setattr(pool, "parts", fails(PeerLost("no worker")))
    with pytest.raises(PeerLost):
        whole.serve(ASKED)
    assert whole.events == []


# --- the policy -------------------------------------------------------------------------------------------


def test_policy_change_reaches_supervisor_client_and_others(whole: WholeEngine) -> None:
    message = SetPolicy(7, "layerwise")
    (changed,) = whole.serve(message)
    assert whole.events == [
        ToSupervisor(message),
        ToClients([(b"c", PolicyChanged(7, "layerwise", True, changed.notes))]),
        ToOtherClients(b"c", PolicyChanged(-1, "layerwise", True, changed.notes)),
    ]


def test_options_of_a_policy_are_texts(whole: WholeEngine) -> None:
    inbox = Inbox()
    service = whole.service(inbox)
    inbox.put(b"c", SetPolicy(7, "random", {"seed": "3"}, counted=False))
    inbox.put(b"c", SetPolicy(8, "random", {"seed": " " * 70_000 + "4"}))
    inbox.put(b"c", ASKED)
    service.serve()
    (refused,) = [message for message in whole.sent() if isinstance(message, Error)]
    assert len(refused.text) < 200
    stats = service.status.stats()
    assert (stats["policy"], stats["policy_options"]) == ("random", {"seed": "3"})
    assert (stats["counted_tokens"], stats["engine"]["decode"]["rows"]) == (0, 2)


def test_uncounted_policy_stays_uncounted_when_it_is_made_anew(whole: WholeEngine) -> None:
    engine, policies = whole.parts.engine, whole.policies()
    for counted in (True, False):
        policies.set(PolicyRequest("layerwise", {"replacement": "keep"}), counted)
        before, old = engine.popularity.sum(), engine.policy
        policies.reset()
        assert (engine.policy.name, engine.policy is old) == ("layerwise", False)
        assert policies.current == PolicyRequest("layerwise", {"replacement": "keep"})
        whole.prefill()
        assert engine.popularity.sum() - before == (8 if counted else 0)  # 2 experts in each of 2 layers


def test_configured_policy_is_set_first_and_device_memory_opened_once(whole: WholeEngine) -> None:
    notes = len(whole.parts.notes)
    policies = whole.policies(policy="layerwise", policy_options={"replacement": "keep"})
    assert policies.current == PolicyRequest("layerwise", {"replacement": "keep"})
    (slab,) = whole.parts.notes[notes:]
    assert slab == "slab: 13 tiles and 4 for streaming"
    with pytest.raises(PolicyError):
        whole.policies(policy="layerwise", policy_options={"replacement": "x"})
    memory = whole.parts.engine.first.memory
    whole.policies(policy="on-demand")
    assert whole.parts.engine.first.memory is memory


def test_hosts_on_other_machines_keep_their_lease_while_device_memory_is_opened(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted engine may wait there for longer, for the memory of the one before."""
    open_slab, kept = whole.parts.device.open_slab, list[bool]()

    class Machines:
        @contextmanager
        def kept(self) -> Iterator[None]:
            kept.append(True)
            yield
            kept.append(False)

    def opening(*arguments: Any) -> Any:
        assert kept == [True]
        return open_slab(*arguments)

    with monkeypatch.context() as several:
        several.setattr(whole.parts, "machines", Machines())
        several.setattr(whole.parts.device, "open_slab", opening)
        whole.policies(policy="layerwise")
    assert kept == [True, False]


def test_costs_are_measured_once(whole: WholeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a policy needs them."""
    monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.0)
    engine, policies = whole.parts.engine, whole.policies()
    assert policies.costs is None
    policies.set(PolicyRequest("fiddler"))
    first = policies.costs
    assert first is not None
    assert engine.first.driver.view.costs == first
    policies.set(PolicyRequest("all-host"))
    assert engine.first.driver.view.costs is None
    policies.set(PolicyRequest("bandwidth-split"))
    assert engine.first.driver.view.costs == policies.costs == first


def test_policies_get_the_calibration_of_the_model(
    whole: WholeEngine, costs_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged one is refused only where it is needed; the policy in use is kept then."""
    engine, policies = whole.parts.engine, whole.policies(costs=costs_file)
    assert engine.first.driver.view.calibration is None
    path = save_calibration(whole)
    policies.reset()
    assert engine.first.driver.view.calibration is not None
    path.write_bytes(b"\0" * 100)
    policies.set(PolicyRequest("layerwise"))
    assert engine.first.driver.view.calibration is None
    assert "it is not a complete calibration" in caplog.text
    with pytest.raises(CalibrationError):
        policies.set(PolicyRequest("dali"))
    assert engine.policy.name == policies.current.name == "layerwise"


def test_what_one_start_used_is_resident_at_the_next(
    tiny_model: Path, tmp_path: Path, costs_file: Path
) -> None:
    """Where the policy asks for it."""
    with whole_engine(tiny_model, tmp_path) as whole:
        inbox = Inbox(lambda: whole.sent() != [])
        service = whole.service(inbox, policy="cache", costs=costs_file)
        inbox.put(b"c", ASKED)
        service.serve()
        used = whole.parts.engine.popularity.copy()
        path = whole.config.cache / whole.config.fingerprint / NAME
        assert not path.exists()  # few tokens: written when the engine ends
    assert path.exists()
    with whole_engine(tiny_model, tmp_path) as whole:
        policies = whole.policies(policy="cache", costs=costs_file)
        view = whole.parts.engine.first.driver.view
        assert view.heat is not None
        assert np.array_equal(view.heat, used)
        for layer, kept in enumerate(view.target > 0):
            assert used[layer, kept].min() >= used[layer, ~kept].max(initial=0)
        policies.set(PolicyRequest("fiddler"))
        assert whole.parts.engine.first.driver.view.heat is None
        path.unlink()
        whole.serve(ASKED)
    assert not path.exists()


def test_an_idle_engine_keeps_what_it_counted(
    whole: WholeEngine, costs_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_switch, "ENOUGH_TOKENS", 1)
    path = whole.config.cache / whole.config.fingerprint / NAME
    inbox = Inbox(lambda: path.exists())
    service = whole.service(inbox, policy="cache", costs=costs_file)
    inbox.put(b"c", ASKED)
    service.serve()
    assert path.exists()


# --- between requests -------------------------------------------------------------------------------------


def test_idle_engine_fetches_in_the_background(whole: WholeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its waits are shorter meanwhile; once idle its memory is audited."""
    audits: list[int] = []

    def until() -> bool:
        if len(inbox.waits) == 1:
            memory.mover.retarget([Target(1, expert, 3) for expert in range(4)])
        return len(inbox.waits) > 1 and inbox.waits[-1] == IDLE_WAIT

    inbox = Inbox(until)
    service = whole.service(inbox, policy="on-demand", link_gbps=0.002)  # 12 ms a tile
    memory: Any = whole.parts.engine.first.memory
    monkeypatch.setattr(memory, "audit", lambda: audits.append(len(inbox.waits)))
    service.serve()
    assert memory.residency.tolist() == [[0] * 4, [3] * 4]
    first, *moving, last = inbox.waits
    assert (first, set(moving), last) == (IDLE_WAIT, {MOVING_WAIT}, IDLE_WAIT)
    assert audits == [len(inbox.waits) - 1]


@pytest.mark.parametrize("chunk", [None, 21])
def test_warm_up_measures_the_chunk_and_forgets_the_trials(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk
) -> None:
    """Unless it is given. The trace begins after the trials."""

    def measure(*given: object) -> tuple[int, int]:
        assert given == (engine, whole.parts.kv, CONTEXT)
        whole.prefill()
        return 17, 34

    monkeypatch.setattr(engine_service, "measure_chunks", measure)
    engine, inbox, record = whole.parts.engine, Inbox(), tmp_path / "steps.trace"
    service = whole.service(inbox, policy="on-demand", chunk=chunk, record=record)
    first = engine.policy
    service.warm_up()
    assert (engine.policy is first) == (chunk is not None)
    stats = service.status.stats()
    chunks = (stats["scheduler"]["prefill_chunk"], stats["scheduler"]["prefill_chunk_alone"])
    assert chunks == ((17, 34) if chunk is None else (21, 21))
    assert (stats["counted_tokens"], stats["engine"]["prefill"]["rows"]) == (0, 0)
    inbox.put(b"c", ASKED)
    service.serve()
    assert [step.phase for step in Trace(record).steps()] == ["prefill", "decode", "decode"]
    process = psutil.Process()
    assert str(record) in {file.path for file in process.open_files()}
    whole.parts.closing.close()
    assert str(record) not in {file.path for file in process.open_files()}


# --- the status -------------------------------------------------------------------------------------------


def test_stats_of_an_engine(whole: WholeEngine, costs_file: Path) -> None:
    inbox = Inbox()
    service = whole.service(inbox, costs=costs_file, link_gbps=2.0)
    before = service.status.stats()
    assert not {"cache", "costs"} & before.keys()
    assert (before["peers"], before["recovery"], before["malformed"]) == ([], {}, {})
    for message in (SetPolicy(6, "fiddler"), SetPolicy(7, "fiddler", {"assignment": "device"}), ASKED):
        inbox.put(b"c", message)
    service.serve()
    engine, socket = whole.parts.engine, whole.parts.sockets["prefetcher"]
    memory: Any = engine.first.memory
    memory.mover.retarget([Target(*np.argwhere(memory.residency == 0)[0].tolist(), 1)])  # not resident yet
    stats = service.status.stats()
    decode, prefill = stats["engine"]["decode"], stats["engine"]["prefill"]
    wanted = {
        "policy": "fiddler",
        "policy_options": {"assignment": "device"},
        "calibrated": False,
        "emulation": "link paced to 2 GB/s",
        "engine": engine.counters.snapshot(),
        "counted_tokens": 4 + 2,
        "tile_bytes": 32 * 3 * 64 * 4,
        "peers": socket.stats(),
        "costs": COSTS.to_json(),
        "cache": {
            "capacity_tiles": 13,
            "all_tiles": 24,
            "resident_tiles": memory.residency.sum(),
            "demanded_tiles": decode["fetched_tiles"] + prefill["fetched_tiles"],
            "placed_tiles": memory.mover.placed,
        },
    }
    assert {key: stats[key] for key in wanted} == wanted
    assert (stats["scheduler"]["kv_tokens"], stats["scheduler"]["max_running"]) == (4 * CONTEXT, 3)
    assert stats["cache"]["resident_tiles"] == stats["cache"]["placed_tiles"] == 12
    assert stats["cache"]["demanded_tiles"] > 0


# --- the whole life ---------------------------------------------------------------------------------------


def run(config: dict[str, Any], inbox: EngineInbox, congested: Any = lambda client: False) -> list[Any]:
    """The events but the progress of loading."""
    events: list[Any] = []
    run_engine(CoordinatorConfig.from_map(config), inbox, events.append, ExitEvents(), congested, TEXT_UP)
    return [e for e in events if not (isinstance(e, ToSupervisor) and isinstance(e.message, Progress))]


def test_engine_is_ready_before_it_warms_up_and_then_serves(tiny_model: Path, tmp_path: Path) -> None:
    inbox = Inbox()
    inbox.put(b"c", ASKED)
    with coordinator_map(tiny_model, tmp_path, replace(OPTIONS, chunk=None)) as config:
        ready, *answer = run(config, inbox)
    assert isinstance(ready, EngineReady)
    assert ready.status.stats()["scheduler"]["prefill_chunk"] in (16, 32, 64)
    assert [note.split(":")[0] for note in ready.notes] == [
        "store",
        "backbone",
        "kernels",
        "experts",
        "context",
    ]
    assert [type(message) for event in answer for _, message in event.messages] == ANSWER
    assert not list(tmp_path.glob("cache/*"))


FAILURES: dict[str, tuple[dict[str, Any], str, bool, bool]] = {
    "bad options": ({"context": 999}, "--context 999 is more than the model's 256 positions", True, False),
    "a bad file": ({"record": Path("/no/t")}, "--record /no/t: no file can be made there", True, True),
    "full memory": ({"policy": "on-demand"}, "full", True, False),
    "of a child": ({"workers": 1}, "0 of 1 workers were ready after 0 s", False, False),
    "a bug": ({}, "the engine failed: TypeError: the first argument must be callable", False, True),
}


@pytest.mark.parametrize(("options", "text", "usage", "ready"), FAILURES.values(), ids=FAILURES.keys())
def test_failure_of_the_engine_is_posted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options, text, usage, ready
) -> None:
    monkeypatch.setattr("pipeline.serving.engine_parts.CHILD_LIMIT", 0.0)
    monkeypatch.setattr(CpuDevice, "open_slab", fails(NotEnoughMemory("full")))
    inbox = Inbox()
    inbox.put(b"c", ASKED)
    with coordinator_map(tiny_model, tmp_path, replace(OPTIONS, **options)) as config:
        config["workers"] = [1] * config["config"]["workers"]
        *before, failed = run(config, inbox, None)
    assert [type(event) for event in before] == [EngineReady] * ready
    assert isinstance(failed, EngineFailed)
    assert (failed.reason.startswith(text), failed.usage) == (True, usage)


def test_progress_is_counted_at_layers_and_while_the_thread_waits_for_messages_or_children(
    whole: WholeEngine,
) -> None:
    """The supervisor takes a thread that counts none for hung."""
    line = whole.parts.control.line("coordinator", 0)
    whole.policies(policy="layerwise")
    begun = line.ticks
    whole.prefill()
    assert line.ticks - begun >= whole.parts.engine.shape.layers
    begun = line.ticks
    whole.parts.sockets["prefetcher"].receive(50)
    assert line.ticks - begun >= 5
    inbox = Inbox(lambda: len(inbox.waits) == 7)
    service, begun = whole.service(inbox), line.ticks
    service.serve()
    assert line.ticks - begun >= 7
