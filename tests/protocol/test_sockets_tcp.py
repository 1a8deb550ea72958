"""Sockets on tcp: encrypted, and refused for peers without an admitted key."""

import contextlib
import socket
import threading
import time

import pytest
import zmq
from free_port import free_port

from protocol.errors import ProtocolError
from protocol.keys import ClientKeys, EngineKeys, binary_key, new_keys
from protocol.sockets import bind_router, check_tcp, connect_dealer

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
                    assert domain == b"tandem"
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


def test_a_client_with_keys_talks_over_tcp(context, tcp):
    with (
        door(context, frozenset({binary_key(CLIENT.public)})),
        bind_router(context, tcp, keys=ENGINE) as router,
        connect_dealer(context, tcp.replace("127.0.0.1", "localhost"), keys=CLIENT) as dealer,
    ):
        assert (router.get(zmq.TCP_KEEPALIVE), router.get(zmq.TCP_KEEPALIVE_CNT)) == (1, 3)
        assert router.get(zmq.TCP_KEEPALIVE_IDLE) == router.get(zmq.TCP_KEEPALIVE_INTVL) == 5  # seconds
        assert router.get(zmq.TCP_MAXRT) == 15_000  # milliseconds
        assert (router.get(zmq.IPV6), dealer.get(zmq.IPV6)) == (0, 1)
        dealer.send(b"hello")
        assert router.poll(5000)
        name, word = router.recv_multipart()
        assert word == b"hello"
        router.send_multipart([name, b"there"])
        assert dealer.poll(5000)
        assert dealer.recv() == b"there"


def test_without_a_handler_no_peer_is_admitted(context, tcp):
    with (
        bind_router(context, tcp, keys=ENGINE) as router,
        connect_dealer(context, tcp, keys=CLIENT) as dealer,
    ):
        dealer.send(b"hello")
        assert not router.poll(1000)
        dealer.close(linger=0)


def test_the_largest_frame_goes_through_encryption_and_a_larger_one_does_not(context, tcp):
    with (
        door(context, frozenset({binary_key(CLIENT.public)})),
        bind_router(context, tcp, keys=ENGINE, largest=1 << 20) as router,
        connect_dealer(context, tcp, keys=CLIENT) as dealer,
    ):
        dealer.send(bytes(1 << 20))
        assert router.poll(5000)
        assert len(router.recv_multipart()[1]) == 1 << 20
        dealer.send(bytes((1 << 20) + 2048))
        assert not router.poll(500)
        dealer.close(linger=0)


def test_keys_and_tcp_belong_together(context, endpoint):
    for make, keys in ((bind_router, ENGINE), (connect_dealer, CLIENT)):
        with pytest.raises(
            ProtocolError, match=r"'tcp://127.0.0.1:5555' is tcp, which is served with keys only$"
        ):
            make(context, "tcp://127.0.0.1:5555")
        with pytest.raises(ProtocolError, match=r"is not tcp://HOST:PORT, and keys are for that$"):
            make(context, endpoint, keys=keys)


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
    for make in (
        lambda: bind_router(context, wrong, keys=ENGINE),
        lambda: connect_dealer(context, wrong, keys=CLIENT),
    ):
        with pytest.raises(ProtocolError, match=r"^endpoint .* is not tcp://HOST:PORT$"):
            make()


def test_the_parts_of_a_tcp_endpoint():
    assert check_tcp("tcp://example.org:5555") == ("example.org", 5555)
    assert check_tcp("tcp://*:1") == ("*", 1)
    assert check_tcp("tcp://[::1]:65535") == ("::1", 65535)


def test_a_port_in_use_and_an_address_of_another_machine(context, tcp):
    in_use = rf"^cannot bind {tcp}: Address already in use$"
    with bind_router(context, tcp, keys=ENGINE), pytest.raises(ProtocolError, match=in_use):
        bind_router(context, tcp, keys=ENGINE)
    with pytest.raises(ProtocolError, match=r"^cannot bind tcp://192.0.2.1:5555: "):
        bind_router(context, "tcp://192.0.2.1:5555", keys=ENGINE)


def test_malformed_keys_are_refused(context, tcp):
    nonsense = b"#" * 40
    with pytest.raises(ProtocolError, match=r"^cannot bind "):
        bind_router(context, tcp, keys=EngineKeys(nonsense, nonsense, ()))
    with pytest.raises(ProtocolError, match=r"^cannot connect to "):
        connect_dealer(context, tcp, keys=ClientKeys(CLIENT.public, CLIENT.secret, nonsense))


def test_peer_that_connects_and_sends_nothing_is_dropped(context, tcp, monkeypatch):
    monkeypatch.setattr("protocol.sockets.HANDSHAKE_MS", 200)
    with bind_router(context, tcp, keys=ENGINE):
        host, port = check_tcp(tcp)
        for words in (b"", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15 + 1 + 31)):
            with socket.create_connection((host, port), timeout=5) as foreign:
                foreign.sendall(words)
                began = time.monotonic()
                while foreign.recv(1000):
                    pass
                assert 0.1 < time.monotonic() - began < 3
