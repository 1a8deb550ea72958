"""What clients with a key may do and see, at a coordinator with an engine: by the right of their key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import zmq.asyncio
from client_service import introduced
from msgspec import structs
from raw_client import RawClient, raw_client
from whole_engine import OPTIONS, coordinator_map

from pipeline.coordinator import Coordinator
from pipeline.serving import calibration_service
from pipeline.serving.rights import WithoutPaths
from protocol.codec import encode
from protocol.messages import (
    VERSION,
    Calibrate,
    Done,
    Error,
    Generate,
    Hello,
    PolicyChanged,
    SetPolicy,
    Shutdown,
    Stats,
    StatsReply,
    Token,
    Welcome,
)
from protocol.sockets import bind_router, ipc_endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = Generate(1, token_ids=(5, 6, 7), max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("rights")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tiny_model: Path, folder: Path) -> AsyncIterator[None]:
    options = replace(
        OPTIONS, listen="tcp://127.0.0.1:1"
    )  # where the door would listen, which is not started
    with coordinator_map(tiny_model, folder, options) as config, zmq.asyncio.Context() as context:
        supervisor = bind_router(context, ipc_endpoint(folder, "control.sock"))
        running = asyncio.create_task(Coordinator(config).serve())
        yield
        await supervisor.send_multipart([config["identity"], *encode(Shutdown())])
        assert await running == 0
        supervisor.close(linger=0)


@asynccontextmanager
async def client_of(
    folder: Path, right: str | None, key: str = "a key"
) -> AsyncIterator[tuple[RawClient, Welcome]]:
    """Without a right a local one."""
    local = raw_client(ipc_endpoint(folder, "client.sock"), hello=False)
    where = ipc_endpoint(folder, "remote.sock")
    async with local if right is None else introduced(where, key, right) as client:
        await client.send(Hello(VERSION))
        yield client, await client.expect(Welcome)


async def last_answer(client: RawClient, message: object) -> object:
    await client.send(message)
    while not isinstance(answer := await client.next(), Done | Error | PolicyChanged | StatsReply):
        pass
    return answer


@pytest.mark.parametrize(
    ("right", "policy", "calibration"),
    [("use", False, False), ("tune", True, False), ("admin", True, True), (None, True, True)],
)
async def test_what_each_right_may_do(serving, folder: Path, right, policy: bool, calibration: bool) -> None:
    async with client_of(folder, right) as (client, _):
        found = await last_answer(client, SetPolicy(2, "all-host"))
        if policy:
            assert isinstance(found, PolicyChanged)
        else:
            needed = "changing the policy needs a key with the right tune, and this one has use"
            assert found == Error(2, f"{needed}: python launch.py keys")
        found = await last_answer(
            client, Calibrate(3, token_ids=())
        )  # refused by the calibration, if by no right
        assert isinstance(found, Done)
        assert ("calibrating needs a key with the right admin" in found.error) != calibration
        done = await last_answer(client, ASKED)
        assert isinstance(done, Done)
        assert done.reason == "length"


@pytest.mark.parametrize("right", ["use", "tune", "admin", None])
async def test_what_each_right_sees(serving, folder: Path, tiny_model: Path, right: str | None) -> None:
    async with (
        client_of(folder, right, f"the key of {right}") as (client, welcome),
        client_of(folder, None) as other,
    ):
        await last_answer(other[0], ASKED)
        await last_answer(client, ASKED)
        reply = await last_answer(client, Stats(4))
        assert isinstance(reply, StatsReply)
        stats = reply.stats
        if right in ("admin", None):
            assert welcome.model == str(tiny_model)
            assert {"engine", "peers", "clients"} < stats.keys()
        else:
            assert welcome.model == tiny_model.name
            assert stats.keys() == {
                "policy", "policy_options", "emulation", "calibrated", "tiles_per_expert", "tile_bytes",
                "scheduler",
            }  # fmt: skip
            own = {name: stats["scheduler"][name] for name in ("waiting", "running", "ended")}
            assert own == {"waiting": 0, "running": 0, "ended": 1}
            assert str(folder) not in str(stats)


async def test_counters_of_an_answer_are_its_own_or_not_shown(serving, folder: Path) -> None:
    """Beside another client's request; a request that was alone has them."""
    async with client_of(folder, "use") as (client, _), client_of(folder, None) as (other, _):
        alone = await last_answer(client, ASKED)
        await other.send(structs.replace(ASKED, max_tokens=50))
        assert isinstance(await other.next(), Token)
        beside = await last_answer(client, ASKED)
        theirs = await last_answer(other, Stats(5))
        while not isinstance(theirs, Done):
            theirs = await other.next()
        assert isinstance(alone, Done)
        assert isinstance(beside, Done)
        phases = alone.stats["engine"].values()
        assert sum(phase["rows"] for phase in phases) == 3 + 2  # the prompt and the answer but its last token
        assert "engine" not in beside.stats
        assert beside.stats["decode_tokens"] == 2
        assert "engine" in theirs.stats  # a local client's, as before


async def test_calibration_has_limits(serving, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens for all; of time for a key, because others wait."""
    text = {"token_ids": tuple(range(5, 95)) * 8}
    async with client_of(folder, "admin") as (client, _):
        most = calibration_service.MOST_TOKENS
        found = await last_answer(client, Calibrate(3, **text, tokens=most + 1))
        assert isinstance(found, Done)
        assert found.error == f"tokens must be at most {most}, it is {most + 1}"
        monkeypatch.setattr(calibration_service, "REMOTE_SECONDS", 0.0)
        found = await last_answer(client, Calibrate(4, **text))
        assert isinstance(found, Done)
        assert found.error == "the calibration took longer than 0 s; try it with fewer tokens"


async def test_paths_are_taken_out_of_what_is_sent() -> None:
    folders = {"name": Path("/data/models/name"), "the cache": Path("/data"), "a shape": Path("shape")}
    shown = WithoutPaths("name", folders)
    assert shown(Error(1, "/data/models/name/x and /data/y: shape")) == Error(
        1, "name/x and the cache/y: shape"
    )
    assert shown(Done(1, "error", "no /data")) == Done(1, "error", "no the cache")
    assert shown(PolicyChanged(1, "p", True, ("/data/a",))) == PolicyChanged(1, "p", True, ("the cache/a",))
    token = Token(1, 0, 5, "/data")
    assert shown(token) is token
