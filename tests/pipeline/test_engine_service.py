"""The engine's thread with stand-ins for the engine's parts: which message each event posts, and to whom."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import ResolvedConfig
from pipeline.errors import CalibrationError, NumberInUse, PeerLost, PolicyError, RequestError
from pipeline.policies.view import PolicyRequest
from pipeline.serving import engine_service, policy_switch
from pipeline.serving.engine_events import EngineFailed, ToClient, ToOtherClients, ToSupervisor
from pipeline.serving.engine_inbox import ClientGone, EngineInbox
from pipeline.serving.engine_service import CALIBRATING, INBOX_SECONDS, EngineService, run_engine
from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.policy_switch import PolicySwitch
from protocol.messages import (
    VERSION,
    Calibrate,
    Cancel,
    Done,
    Error,
    Generate,
    PolicyChanged,
    Sampling,
    Score,
    SetPolicy,
    Welcome,
)
from shm.errors import NotEnoughMemory

ON_DEVICE = "on-demand"


class Policies:
    """A PolicySwitch that applies the policy "good" and refuses others."""

    costs = None

    def __init__(self, parts: Any) -> None:
        self.parts, self.requests = parts, []
        self.refusal: Exception = PolicyError("no such policy")

    def set(self, request: PolicyRequest) -> tuple[str, ...]:
        self.requests.append(request)
        if request.name != "good":
            raise self.refusal
        self.parts.engine.policy = SimpleNamespace(name="good", exact=False)
        return ("a note",)


class Recording:
    """A scheduler and a CalibrationService that record their calls."""

    idle = True
    running = False
    refusal: Exception | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, client: bytes, message: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(("submit", client, message))

    def cancel(self, client: bytes, request: int) -> None:
        self.calls.append(("cancel", client, request))

    def forget(self, client: bytes) -> None:
        self.calls.append(("forget", client))

    def serve(self, client: bytes, message: object) -> None:
        self.calls.append(("serve", client, message))

    def cancel_all(self) -> None:
        self.calls.append(("cancel_all",))


class Scene:
    """A service, and the events that it has posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[object] = []
        self.inbox = EngineInbox()
        self.scheduler, self.calibrations = Recording(), Recording()
        options = ResolvedConfig(max_sequences=3)
        self.engine = SimpleNamespace(backbone=SimpleNamespace(spec=SimpleNamespace(vocabulary=9)))
        self.parts = SimpleNamespace(
            config=SimpleNamespace(options=options, model=Path("/nowhere")),
            tokenizer=None,
            engine=self.engine,
            context=16,
            kv=None,
        )
        monkeypatch.setattr(engine_service, "PolicySwitch", Policies)
        monkeypatch.setattr(engine_service, "Scheduler", lambda *args, **kwargs: self.scheduler)
        monkeypatch.setattr(engine_service, "CalibrationService", lambda *args, **kwargs: self.calibrations)
        self.service = EngineService(self.parts, self.inbox, self.events.append, lambda client: False)
        self.policies: Any = self.service._policies

    def handle(self, *messages: object) -> list[object]:
        """Serve these messages of client "c", then stop; the events."""
        for message in messages:
            assert self.inbox.put(b"c", message)
        self.inbox.stop()
        self.service.serve()
        return self.events


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_policy_change_reaches_supervisor_client_and_others(scene: Scene) -> None:
    message = SetPolicy(7, "good", {"swaps": 3})
    assert scene.handle(message) == [
        ToSupervisor(message),
        ToClient(b"c", PolicyChanged(7, "good", False, ("a note",))),
        ToOtherClients(b"c", PolicyChanged(-1, "good", False, ("a note",))),
    ]
    assert scene.policies.requests == [PolicyRequest("good", {"swaps": "3"})]


@pytest.mark.parametrize("refusal", [PolicyError("no such policy"), NotEnoughMemory("no such policy")])
def test_refused_policy_is_an_error_to_its_client_alone(scene: Scene, refusal) -> None:
    scene.policies.refusal = refusal
    assert scene.handle(SetPolicy(7, "bad")) == [ToClient(b"c", Error(7, "no such policy"))]


def test_policy_is_not_changed_during_a_calibration(scene: Scene) -> None:
    scene.calibrations.running = True
    assert scene.handle(SetPolicy(7, "good")) == [ToClient(b"c", Error(7, CALIBRATING))]
    assert scene.policies.requests == []


@pytest.mark.parametrize("message", [Generate(4), Score(4)])
def test_refused_request_is_a_done_and_a_repeated_number_an_error(scene: Scene, message) -> None:
    scene.scheduler.refusal = RequestError("too long")
    assert scene.handle(message) == [ToClient(b"c", Done(4, "error", "too long", usage=True))]


def test_repeated_number_is_an_error(scene: Scene) -> None:
    scene.scheduler.refusal = NumberInUse("4 is being served")
    assert scene.handle(Generate(4)) == [ToClient(b"c", Error(4, "4 is being served"))]


def test_stopped_engine_handles_waiting_messages_and_then_ends_every_request(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message takes longer than the inbox may take between two rounds."""
    clock = count(start=0.0, step=2 * INBOX_SECONDS)
    monkeypatch.setattr(engine_service, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    first, second, third = Generate(1), Score(2), Calibrate(3)
    assert scene.handle(first, second, third, Cancel(1), ClientGone()) == []
    ends = [("cancel", b"c", 1), ("forget", b"c")]
    assert scene.calibrations.calls == [("serve", b"c", third), *ends]
    submitted = [("submit", b"c", first), ("submit", b"c", second)]
    assert scene.scheduler.calls == [*submitted, *ends, ("cancel_all",)]


def test_failing_engine_ends_no_request(scene: Scene) -> None:
    """Clients resume their requests on the restarted engine."""
    scene.scheduler.refusal = PeerLost("no worker")
    assert scene.inbox.put(b"c", Generate(1))
    with pytest.raises(PeerLost):
        scene.service.serve()
    assert (scene.scheduler.calls, scene.events) == ([], [])


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (PolicyError("bad option"), EngineFailed("bad option", True)),
        (NotEnoughMemory("full"), EngineFailed("full", True)),
        (PeerLost("no worker"), EngineFailed("no worker", False)),
        (ZeroDivisionError("a bug"), EngineFailed("the engine failed: ZeroDivisionError: a bug", False)),
    ],
)
def test_failure_to_build_the_engine_is_posted(monkeypatch: pytest.MonkeyPatch, error, event) -> None:
    def build(*args: object) -> None:
        raise error

    monkeypatch.setattr(engine_service, "EngineParts", build)
    events: list[object] = []
    run_engine(None, EngineInbox(), events.append, exits=None, congested=lambda client: False)
    assert events == [event]


# --- the policy -------------------------------------------------------------------------------------------


class Switch:
    """A PolicySwitch on an engine that records the policies that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, policy: str | None = None) -> None:
        self.given: list[tuple[str, object, object]] = []
        self.file = folder / "calibration.safetensors"
        self.found: object = "a calibration"
        self.measured = 0
        engine = SimpleNamespace(memory=SimpleNamespace(exists=False), set_policy=self.set_policy)
        options = ResolvedConfig(policy=policy, seed=5)
        self.parts = SimpleNamespace(
            engine=engine, config=SimpleNamespace(options=options, cache=folder), source=None
        )
        self.parts.notes, self.parts.context = ["built"], 99
        self.opened: list[object] = []

        def open_memory(parts: object) -> SimpleNamespace:
            self.opened.append(parts)
            return SimpleNamespace(exists=True)

        monkeypatch.setattr(policy_switch, "calibration_path", lambda cache, source: self.file)
        monkeypatch.setattr(policy_switch, "open_device_memory", open_memory)
        monkeypatch.setattr(policy_switch, "costs_for", self.costs_for)
        monkeypatch.setattr(policy_switch, "load", self.load)
        self.switch = PolicySwitch(self.parts)

    def set_policy(self, policy: Any, costs: object, calibration: object) -> tuple[str, ...]:
        if policy.name == "random":
            raise PolicyError("refused")
        self.given.append((policy.name, costs, calibration))
        return (f"note of {policy.name}",)

    def costs_for(self, engine: object, config: object, context: int) -> str:
        assert (engine, config, context) == (self.parts.engine, self.parts.config, 99)
        self.measured += 1
        return "costs"

    def load(self, path: Path) -> object:
        assert path == self.file
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_engine_begins_with_the_configured_policy(monkeypatch, tmp_path: Path) -> None:
    scene = Switch(monkeypatch, tmp_path)
    assert scene.given == [("all-host", None, None)]
    assert (scene.opened, scene.measured, scene.parts.notes) == ([], 0, ["built", "note of all-host"])
    assert Switch(monkeypatch, tmp_path, ON_DEVICE).given == [(ON_DEVICE, None, None)]


def test_policy_gets_costs_once_calibration_and_device_memory(monkeypatch, tmp_path: Path) -> None:
    scene = Switch(monkeypatch, tmp_path)
    scene.file.write_text("")
    fiddler = PolicyRequest("fiddler")
    assert scene.switch.set(fiddler) == ("note of fiddler",)
    assert (scene.switch.current, scene.switch.costs) == (fiddler, "costs")
    scene.switch.reset()
    scene.switch.set(PolicyRequest(ON_DEVICE))
    assert scene.given[1:] == [("fiddler", "costs", "a calibration")] * 2 + [
        (ON_DEVICE, None, "a calibration")
    ]
    assert (scene.measured, scene.opened) == (1, [scene.parts])


def test_refused_policy_leaves_the_present_one(monkeypatch, tmp_path: Path) -> None:
    scene = Switch(monkeypatch, tmp_path, ON_DEVICE)
    for request in (PolicyRequest("random"), PolicyRequest("unknown")):
        with pytest.raises(PolicyError):
            scene.switch.set(request)
    assert scene.switch.current == PolicyRequest(ON_DEVICE)


def test_damaged_calibration_is_refused_only_where_it_is_needed(
    monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Switch(monkeypatch, tmp_path)
    scene.file.write_text("")
    scene.found = CalibrationError("it is damaged")
    scene.switch.set(PolicyRequest(ON_DEVICE))
    assert scene.given[-1] == (ON_DEVICE, None, None)
    assert "it is damaged" in caplog.text
    with pytest.raises(CalibrationError):
        scene.switch.set(PolicyRequest("daop"))
    assert scene.switch.current == PolicyRequest(ON_DEVICE)


# --- the status -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokenizer", "template"), [(False, False), (True, False), (True, True)])
def test_welcome_describes_the_engine(tmp_path: Path, tokenizer: bool, template: bool) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    options = ResolvedConfig(format="int8", backbone_dtype="int4", host_slowdown=2.0)
    parts = SimpleNamespace(
        config=SimpleNamespace(engine="e", model=tmp_path, fingerprint="f", options=options),
        tokenizer=SimpleNamespace(has_chat_template=template) if tokenizer else None,
        engine=SimpleNamespace(
            policy=SimpleNamespace(name="p", exact=False),
            backbone=SimpleNamespace(spec=SimpleNamespace(vocabulary=77)),
        ),
        device=SimpleNamespace(name="d"),
        context=55,
    )
    status = EngineStatus(parts, None, None)
    assert status.welcome() == Welcome(
        version=VERSION,
        engine="e",
        model=str(tmp_path),
        fingerprint="f",
        device="d",
        policy="p",
        exact=False,
        vocabulary=77,
        context=55,
        has_tokenizer=tokenizer,
        has_chat_template=template,
        emulation="host slowed by 2",
        sampling=Sampling(repetition_penalty=1.5),
        format="int8",
        backbone_dtype="int4",
    )


@pytest.mark.parametrize("slab", [False, True])
def test_stats_of_an_engine(tmp_path: Path, slab: bool) -> None:
    def socket(role: str, number: int) -> SimpleNamespace:
        return SimpleNamespace(
            stats=lambda: [{"role": role, "index": number}],
            recovery_stats=lambda: {"deaths": number},
            malformed=10 * number,
        )

    cache = SimpleNamespace(capacity=9, residency=np.array([[1, 2], [0, 4]], np.int32))
    mover = SimpleNamespace(cache=cache, demanded=5, placed=6)
    engine = SimpleNamespace(
        policy=SimpleNamespace(name="p"),
        counters=SimpleNamespace(snapshot=lambda: {"decode": {}}),
        driver=SimpleNamespace(prefetch=SimpleNamespace(on=False, status="paused")),
        shape=SimpleNamespace(tiles=3),
        layout=SimpleNamespace(tile_bytes=4096),
        memory=SimpleNamespace(exists=slab, mover=mover),
    )
    options = ResolvedConfig(link_gbps=2.0)
    sockets = {"worker": socket("worker", 1), "prefetcher": socket("prefetcher", 2)}
    config = SimpleNamespace(model=tmp_path, options=options)
    parts = SimpleNamespace(engine=engine, config=config, sockets=sockets)
    policies = SimpleNamespace(
        current=PolicyRequest("p", {"swaps": "3"}),
        costs=SimpleNamespace(to_json=lambda: {"link": 1.0}) if slab else None,
    )
    scheduler = SimpleNamespace(stats=lambda: {"waiting": 8})
    wanted = {
        "policy": "p",
        "policy_options": {"swaps": "3"},
        "emulation": "link paced to 2 GB/s",
        "scheduler": {"waiting": 8},
        "engine": {"decode": {}},
        "prefetch": {"on": False, "status": "paused"},
        "tiles_per_expert": 3,
        "tile_bytes": 4096,
        "peers": [{"role": "worker", "index": 1}, {"role": "prefetcher", "index": 2}],
        "recovery": {"worker": {"deaths": 1}, "prefetcher": {"deaths": 2}},
        "malformed": {"worker": 10, "prefetcher": 20},
    }
    tiles = {"capacity_tiles": 9, "resident_tiles": 7, "demanded_tiles": 5, "placed_tiles": 6}
    wanted |= {"costs": {"link": 1.0}, "cache": tiles} if slab else {}
    assert EngineStatus(parts, policies, scheduler).stats() == wanted
