"""The client library when the engine exits, hangs, is restarted, is of another version, or sends garbage."""

import asyncio
import os
import resource
import shutil
import time

import pytest
import zmq.asyncio
from msgspec.structs import replace
from protocol_engine import QUIET, WELCOME, both, engine, engine_process
from waiting import Stopwatch

from protocol.client import Client
from protocol.codec import encode
from protocol.errors import EngineGone, MalformedMessage, VersionMismatch
from protocol.messages import VERSION, Error
from protocol.sockets import bind_router


async def test_blocked_event_loop_does_not_count_as_silence(endpoint):
    with engine_process(endpoint):
        async with Client.connect(endpoint, silence=0.6) as client:
            await asyncio.sleep(0.1)
            time.sleep(0.9)  # noqa: ASYNC251 - this program's own fault
            for _ in range(5):
                assert await client.stats()
                await asyncio.sleep(0.2)


async def test_silent_engine_counts_as_gone(endpoint):
    async with both(endpoint, silence=QUIET) as (server, client):
        await asyncio.sleep(QUIET + 0.3)  # heartbeats alone keep the connection
        answer = client.generate(prompt="slow", max_tokens=10_000)
        pending = [asyncio.create_task(answer.result()), asyncio.create_task(client.stats())]
        await asyncio.sleep(0.1)
        server.mute = True
        watch = Stopwatch()
        pending.append(asyncio.create_task(client.set_policy("fiddler")))
        await asyncio.wait(pending, timeout=5.0)
        assert watch.shows(0.8 * QUIET, QUIET + 0.5)
        assert pending[1].result()  # answered before the silence
        line = f"^the engine at {endpoint} has been silent for {QUIET} s$"
        for task in (pending[0], pending[2]):
            with pytest.raises(EngineGone, match=line):
                task.result()
        for call in (client.stats, lambda: client.set_policy("x"), lambda: anext(client.score(text="x"))):
            watch = Stopwatch()
            with pytest.raises(EngineGone, match=line):
                await call()
            assert watch.shows(0.0, 0.1)
        with pytest.raises(EngineGone, match=line):
            client.generate(prompt="hi")


async def test_client_without_a_free_descriptor_says_so_and_may_try_again(endpoint):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with engine_process(endpoint):
        async with Client.connect(endpoint):  # its context has what it needs
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # those that are open stay so
        try:
            with pytest.raises(EngineGone, match="can be opened: Too many open files"):
                async with Client.connect(endpoint):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with Client.connect(endpoint) as client:
            assert await client.stats()


@pytest.mark.parametrize("what", ["directory", "pipe in an open directory"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
async def test_client_does_not_speak_to_another_users_engine_in_the_place_of_its_own(endpoint, runtime, what):
    moved = runtime.with_name(f"{runtime.name}-moved")
    with engine_process(endpoint) as process:
        async with Client.connect(endpoint, retry=30.0) as client:
            pending = asyncio.create_task(client.generate(prompt="slow", max_tokens=10_000).result())
            await asyncio.sleep(0.1)
            runtime.rename(moved)
            runtime.mkdir(mode=0o700)
            try:
                if what == "directory":
                    os.chown(runtime, 12345, 12345)
                else:
                    runtime.chmod(0o755)
                    os.mkfifo(runtime / "lock")
                with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as proxy:
                    proxy.bind(endpoint)
                    process.kill()
                    with pytest.raises(EngineGone, match=rf"was stopped: {runtime} (belongs|is open)"):
                        async with asyncio.timeout(10.0):
                            await pending
                    assert not await proxy.poll(300)  # it has received nothing
            finally:
                shutil.rmtree(runtime)
                moved.rename(runtime)


async def test_restarted_engine_does_not_know_this_client(endpoint):
    async with engine(endpoint):
        connecting = Client.connect(endpoint)
        client = await connecting.__aenter__()
        waiting = asyncio.create_task(client.generate(prompt="slow", max_tokens=10_000).result())
        await asyncio.sleep(0.1)
    try:
        async with engine(endpoint):
            with pytest.raises(EngineGone, match=r"^the engine ended this connection: say Hello first$"):
                async with asyncio.timeout(10.0):
                    await waiting
    finally:
        await connecting.__aexit__(None, None, None)


async def test_missing_engine_is_an_error_within_the_timeout(endpoint):
    watch = Stopwatch()
    with pytest.raises(EngineGone, match=rf"^no engine at {endpoint} within 0\.3 s; is it running\?$"):
        async with Client.connect(endpoint, timeout=0.3):
            pass
    assert watch.shows(0.25, 1.0)


NEWER = (
    f"the engine speaks protocol version 11, this client version {VERSION};"
    " use the client that was installed with"
)


@pytest.mark.parametrize(
    ("reply", "error", "line"),
    [
        (encode(replace(WELCOME, version=11)), VersionMismatch, f"^{NEWER} the engine$"),
        ([b"\x02\x0b", b"a header of the future"], VersionMismatch, f"^{NEWER} the engine$"),
        (
            encode(Error(-1, "version 11 here")),
            VersionMismatch,
            "^the engine refused this client: version 11 here$",
        ),
        ([bytes([2, VERSION]), b"rubbish"], MalformedMessage, "^Welcome: Expected `object`, got `int`"),
        ([b"HTTP/1.1 400"], MalformedMessage, "^the first frame is not two bytes"),
    ],
)
async def test_engine_that_sends_garbage_is_an_error(endpoint, reply, error, line):
    with zmq.asyncio.Context() as context, bind_router(context, endpoint) as router:

        async def answer():
            peer, *_ = await router.recv_multipart()
            await router.send_multipart([peer, *reply])

        answering = asyncio.create_task(answer())
        with pytest.raises(error, match=line):
            async with Client.connect(endpoint):
                pass
        await answering


async def test_garbage_in_mid_conversation_ends_the_client_with_one_line(endpoint):
    async with both(endpoint) as (server, client):
        answer = client.generate(prompt="slow", max_tokens=10_000)
        await asyncio.sleep(0.1)
        for peer in server.clients:
            await server.socket.send_multipart([peer, bytes([5, VERSION]), b"\xc1"])
        with pytest.raises(MalformedMessage, match=r"^Done: MessagePack data is malformed"):
            await answer.result()
        with pytest.raises(MalformedMessage, match=r"^Done: MessagePack data is malformed"):
            await client.stats()
