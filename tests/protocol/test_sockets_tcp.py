"""Sockets on tcp: encrypted, and refused for peers without an admitted key."""

import contextlib
import select
import socket
import threading

import pytest
import zmq
from free_port import free_port

from protocol.errors import ProtocolError
from protocol.keys import ClientKeys, EngineKeys, binary_key, new_keys
from protocol.sockets import bind_router, check_tcp, connect_curve_server, connect_dealer, ipc_endpoint

ENGINE, CLIENT = new_keys()


@pytest.fixture
def tcp():
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def door(context, admitted: frozenset[bytes]):
    """A ZAP handler, in a thread of its own."""
    with context.socket(zmq.REP) as handler:
        handler.bind("inproc://zeromq.zap.01")

        def serve() -> None:
            with contextlib.suppress(zmq.ContextTerminated):
                while handler.poll(100) or not ended.is_set():
                    if not handler.poll(0):
                        continue
                    _, request, domain, _, _, _, key = handler.recv_multipart()
                    assert domain == b"one"
                    status = b"200" if key in admitted else b"400"
                    handler.send_multipart([b"1.0", request, status, b"", b"", b""])

        ended = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5)
            assert not thread.is_alive()


@contextlib.contextmanager
def served(context, runtime, tcp, largest=1 << 20):
    """The socket of one client, and a thread for its bytes between tcp and ipc."""
    endpoint = ipc_endpoint(runtime, "one")
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(socket.create_server(check_tcp(tcp)))
        inner = stack.enter_context(socket.socket(socket.AF_UNIX))
        inner.bind(endpoint.removeprefix("ipc://"))
        inner.listen()
        server = connect_curve_server(
            context, endpoint, ENGINE, domain=b"one", send_hwm=9, receive_hwm=9, largest=largest
        )
        stack.enter_context(server)

        def relay() -> None:
            client, _ = outer.accept()
            mine, _ = inner.accept()
            other = {client: mine, mine: client}
            with client, mine, contextlib.suppress(OSError):
                while True:
                    for source in select.select([client, mine], [], [])[0]:
                        data = source.recv(65536)
                        if not data:
                            return
                        other[source].sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        try:
            yield server
        finally:
            server.close(linger=0)
            thread.join(5)
            assert not thread.is_alive()


def test_a_client_with_keys_talks_over_tcp(context, runtime, tcp):
    with (
        door(context, frozenset({binary_key(CLIENT.public)})),
        served(context, runtime, tcp) as server,
        connect_dealer(context, tcp.replace("127.0.0.1", "localhost"), keys=CLIENT) as dealer,
    ):
        assert dealer.get(zmq.IPV6) == 1
        dealer.send(b"hello")
        assert server.poll(5000)
        assert server.recv_multipart() == [b"hello"]  # and no identity
        server.send_multipart([b"there"])
        assert dealer.poll(5000)
        assert dealer.recv() == b"there"


def test_without_a_handler_no_peer_is_admitted(context, runtime, tcp):
    with (
        served(context, runtime, tcp) as server,
        connect_dealer(context, tcp, keys=CLIENT) as dealer,
    ):
        dealer.send(b"hello")
        assert not server.poll(1000)
        dealer.close(linger=0)


def test_the_largest_frame_goes_through_encryption_and_a_larger_one_does_not(context, runtime, tcp):
    with (
        door(context, frozenset({binary_key(CLIENT.public)})),
        served(context, runtime, tcp) as server,
        connect_dealer(context, tcp, keys=CLIENT) as dealer,
    ):
        dealer.send(bytes(1 << 20))
        assert server.poll(5000)
        assert len(server.recv_multipart()[0]) == 1 << 20
        dealer.send(bytes((1 << 20) + 2048))
        assert not server.poll(500)
        dealer.close(linger=0)


def test_keys_and_tcp_belong_together(context, endpoint):
    with pytest.raises(
        ProtocolError, match=r"'tcp://127.0.0.1:5555' is tcp, which is served with keys only$"
    ):
        connect_dealer(context, "tcp://127.0.0.1:5555")
    with pytest.raises(ProtocolError, match=r"is not tcp://HOST:PORT, and keys are for that$"):
        connect_dealer(context, endpoint, keys=CLIENT)
    with pytest.raises(ProtocolError, match=r"is not ipc:// with an absolute path$"):
        bind_router(context, "tcp://127.0.0.1:5555")


@pytest.mark.parametrize(
    "wrong",
    [
        "tcp://",
        "tcp://host",
        "tcp://:5",
        "tcp://host:",
        "tcp://host:x",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:5;tcp://other:5",
        "tcp://eth0;127.0.0.1:5",
        "tcp://a b:5",
        "tcp://host:5/path",
        "tcp://host:5\n",
    ],
)
def test_malformed_tcp_endpoint_is_refused(context, wrong):
    with pytest.raises(ProtocolError, match=r"^endpoint .* is not tcp://HOST:PORT$"):
        connect_dealer(context, wrong, keys=CLIENT)


def test_the_parts_of_a_tcp_endpoint():
    assert check_tcp("tcp://example.org:5555") == ("example.org", 5555)
    assert check_tcp("tcp://*:1") == ("*", 1)
    assert check_tcp("tcp://[::1]:65535") == ("::1", 65535)


def test_malformed_keys_are_refused(context, endpoint, tcp):
    nonsense = b"#" * 40
    with pytest.raises(ProtocolError, match=r"^cannot connect to "):
        connect_curve_server(
            context,
            endpoint,
            EngineKeys(nonsense, nonsense, ()),
            domain=b"one",
            send_hwm=1,
            receive_hwm=1,
            largest=1,
        )
    with pytest.raises(ProtocolError, match=r"^cannot connect to "):
        connect_dealer(context, tcp, keys=ClientKeys(CLIENT.public, CLIENT.secret, nonsense))
