"""Sockets and their directories, on the real file system and the real libzmq."""

import contextlib
import ctypes
import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedMessage, ProtocolError
from protocol.files import private_directory
from protocol.sockets import (
    IPC_PATH_MAX,
    Identity,
    bind_router,
    connect_dealer,
    ipc_endpoint,
    is_client_identity,
    parse_identity,
    runtime_root,
)


def test_a_full_queue_is_an_error_for_its_own_peer_only(context, endpoint):
    with (
        bind_router(context, endpoint, send_hwm=1) as router,
        connect_dealer(context, endpoint, identity=b"worker-0-1", receive_hwm=1) as slow,
        connect_dealer(context, endpoint, identity=b"worker-1-1") as quick,
    ):
        for dealer in (slow, quick):
            dealer.send(b"hello")
            assert router.poll(5000)
            router.recv_multipart()
        sent = 0
        while sent < 100 and router.poll(100, zmq.POLLOUT):
            try:
                router.send_multipart([b"worker-0-1", bytes(1 << 20)], flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            sent += 1
        assert 1 <= sent < 100
        router.send_multipart([b"worker-1-1", b"through"], flags=zmq.NOBLOCK)
        assert quick.poll(5000)
        assert quick.recv() == b"through"
        router.close(linger=0)


def test_a_peer_that_connects_again_is_read_also_before_its_last_connection_has_ended(context, endpoint):
    with bind_router(context, endpoint) as router, contextlib.ExitStack() as dealers:
        for word in (b"first", b"second"):
            dealer = dealers.enter_context(connect_dealer(context, endpoint, identity=b"worker-0-1"))
            dealer.send(word)
            assert router.poll(5000)
            assert router.recv_multipart() == [b"worker-0-1", word]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_socket_file_is_private_whatever_the_umask(context, runtime, endpoint, mask):
    before = os.umask(mask)
    try:
        with bind_router(context, endpoint):
            found = os.stat(runtime / "client.sock")
    finally:
        os.umask(before)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_no_socket_in_a_directory_that_others_can_enter(context, runtime, endpoint):
    runtime.chmod(0o750)
    with pytest.raises(
        ProtocolError, match=rf"^{runtime} is open to other users \(mode 0750\); run: chmod 700 "
    ):
        bind_router(context, endpoint)
    runtime.chmod(0o700)
    assert list(runtime.iterdir()) == []


def test_path_that_cannot_be_bound_is_refused(context, runtime):
    (runtime / "client.sock").mkdir()
    with pytest.raises(ProtocolError, match=r"^cannot bind ipc:///.*client.sock: "):
        bind_router(context, ipc_endpoint(runtime, "client.sock"))


@pytest.mark.parametrize(
    "elsewhere", ["udp://127.0.0.1:5555", "inproc://a", "ipc://@abstract", "ipc://relative", "/a/path", ""]
)
def test_only_ipc_endpoints_are_served_without_keys(context, elsewhere):
    for make in (bind_router, connect_dealer):
        with pytest.raises(ProtocolError, match=r"^endpoint '.*' is not ipc:// with an absolute path$"):
            make(context, elsewhere)


def test_the_longest_path_works_and_one_byte_more_is_refused(context, runtime):
    longest = IPC_PATH_MAX - len(bytes(runtime)) - 1
    with bind_router(context, ipc_endpoint(runtime, "x" * longest)):
        assert (runtime / ("x" * longest)).is_socket()
    umlauts = "ü" * (longest // 2 + 1)  # bytes count, not characters
    for name in ("x" * (longest + 1), umlauts):
        with pytest.raises(
            ProtocolError, match=r"has 10[89] bytes, the system's limit is 107; use a shorter"
        ):
            ipc_endpoint(runtime, name)
        with pytest.raises(ProtocolError, match="the system's limit is 107"):
            connect_dealer(context, f"ipc://{runtime}/{name}")
    with pytest.raises(ProtocolError, match="the socket path a/b is not absolute"):
        ipc_endpoint(Path("a"), "b")


def test_the_runtime_root_is_in_the_sessions_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = os.umask(0)
    try:
        root = runtime_root()
    finally:
        os.umask(before)
    assert root == tmp_path / "tandem"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert runtime_root() == root


@pytest.mark.parametrize("session", ["", "relative", "/nowhere/at/all"])
def test_the_runtime_root_without_a_session(monkeypatch, session):
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    root = Path(f"/tmp/tandem-{os.getuid()}")
    existed = root.exists()
    assert runtime_root() == root
    assert root.is_dir()
    if not existed:
        with contextlib.suppress(OSError):  # an engine may have started in it meanwhile
            root.rmdir()


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for name in ("file", "link"):
        with pytest.raises(ProtocolError, match=rf"/{name} is not a directory; remove it and start again$"):
            private_directory(tmp_path / name)
    with pytest.raises(ProtocolError, match=r"^cannot create /.*: No such file or directory$"):
        private_directory(tmp_path / "missing" / "child")


def test_another_users_directory_is_refused(tmp_path):
    if os.getuid() == 0:
        strange = tmp_path / "strange"
        strange.mkdir(mode=0o700)
        os.chown(strange, 12345, -1)
    else:
        strange = Path("/")
    with pytest.raises(ProtocolError, match=r" belongs to user \d+, not to you; have it removed$"):
        private_directory(strange)


KEY = b"k" * 32


@given(
    st.sampled_from(["loader", "coordinator", "worker", "prefetcher"]),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**18 - 1),
    st.binary(min_size=1, max_size=64),
)
def test_identities_survive_the_round_trip(role, index, generation, key):
    known = Identity(role, index, generation)
    assert parse_identity(known.prove(key), key) == known


@given(st.binary(max_size=30) | st.from_regex(rb"\A(worker|x)-[0-9-]{1,4}-[0-9]{1,3}-[0-9a-f]{15,17}\n?\Z"))
def test_other_bytes_are_no_identity(name):
    with pytest.raises(MalformedMessage):
        parse_identity(name, KEY)


def test_an_identity_without_its_proof_is_refused():
    name = Identity("worker", 0, 1).prove(KEY)
    assert name.startswith(b"worker-0-1-")
    stated, proof = name.rsplit(b"-", 1)
    with pytest.raises(MalformedMessage, match=r"^identity worker-0-1 has no valid proof$"):
        parse_identity(name, b"another key")
    with pytest.raises(MalformedMessage, match=r"^identity worker-0-2 has no valid proof$"):
        parse_identity(b"worker-0-2-" + proof, KEY)
    for other in (stated, stated + b"-", name + b"0", name.upper()):
        with pytest.raises(MalformedMessage, match=r"is not <role>-<index>-<generation>-<proof>"):
            parse_identity(other, KEY)


def test_identities_cannot_be_guessed(context, runtime):
    """Other libraries seed C's generator with the time, and a ROUTER counts its identities up from it."""
    made, own = set(), set()
    for i in range(2):
        endpoint = ipc_endpoint(runtime, f"s{i}")
        ctypes.CDLL(None).srand(1)
        with (
            bind_router(context, endpoint) as router,
            context.socket(zmq.DEALER) as foreign,
            connect_dealer(context, endpoint) as dealer,
        ):
            foreign.connect(endpoint)
            for socket, names in ((foreign, made), (dealer, own)):
                socket.send(b"")
                assert router.poll(5000)
                names.add(router.recv_multipart()[0])
    assert len(made) == len(own) == 2
    assert {len(name) for name in own} == {16}
    assert [is_client_identity(name) for name in (*own, *made)] == [True, True, False, False]
    assert not is_client_identity(b"\0" * 16)
