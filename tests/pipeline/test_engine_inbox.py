"""EngineInbox: in order for each client, in turns between clients, bounded."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pipeline import fairness
from pipeline.fairness import CLIENT_BYTES, ID_BYTES, MOST_WAITING
from pipeline.serving.engine_inbox import ClientGone, EngineInbox, EngineMessage
from protocol.messages import Calibrate, Cancel, ChatMessage, Generate, Sampling, Score, SetPolicy


def drained(inbox: EngineInbox) -> list[tuple[bytes, EngineMessage]]:
    items = []
    while (item := inbox.get(0.0)) is not None:
        items.append(item)
    return items


@given(st.text("abc", max_size=40))
def test_each_message_is_delivered_once_and_in_its_client_s_order(clients: str) -> None:
    inbox = EngineInbox()
    for number, client in enumerate(clients):
        inbox.put(client.encode(), Cancel(number))
    items = drained(inbox)
    for client in "abc":
        sent = [number for number, c in enumerate(clients) if c == client]
        assert [message.request for name, message in items if name == client.encode()] == sent
    assert len(items) == len(clients)


def test_only_the_flooding_client_is_refused() -> None:
    inbox = EngineInbox()
    for i in range(MOST_WAITING):
        assert inbox.put(b"a", Cancel(i))
    assert not inbox.put(b"a", Cancel(MOST_WAITING))
    assert inbox.put(b"b", Cancel(0))
    items = drained(inbox)
    assert [message.request for client, message in items if client == b"a"] == list(range(MOST_WAITING))
    assert [index for index, (client, _) in enumerate(items) if client == b"b"] == [1]


def test_large_messages_of_one_client_are_bounded() -> None:
    """By the bytes of their texts and ids. A single message of any size is taken."""
    half = "x" * (CLIENT_BYTES // 2)
    ids = (1,) * (CLIENT_BYTES // ID_BYTES // 2 + 1)
    turn = ChatMessage("user", "x")
    for large in (
        Generate(0, prompt=half),
        Generate(0, messages=(turn, ChatMessage(half, ""))),
        Generate(0, prompt="", stop=("x", half)),
        Generate(0, token_ids=ids),
        Score(0, text=half),
        Calibrate(0, token_ids=ids),
        SetPolicy(0, "x", {"a": half}),
    ):
        inbox = EngineInbox()
        assert inbox.put(b"a", Generate(0, prompt=half + half + "x"))
        assert not inbox.put(b"a", large), large.__class__
        assert inbox.put(b"b", large)
        drained(inbox)
        assert inbox.put(b"a", large)  # messages that were taken out no longer count
        assert not inbox.put(b"a", Generate(1, resume=ids))


def test_messages_of_a_client_that_has_disconnected_are_dropped() -> None:
    """The engine's thread has word of it before anything else, and their bytes are free at once."""
    inbox = EngineInbox()
    large = Generate(0, prompt="x" * CLIENT_BYTES)
    for client in (b"b", b"a"):
        for message in (large, Cancel(1), Cancel(2)):
            inbox.put(client, message)
    inbox.drop(b"a")
    inbox.drop(b"unknown")
    assert inbox.put(b"a", large)
    gone = [(b"a", ClientGone()), (b"unknown", ClientGone())]
    assert drained(inbox) == [*gone, (b"b", large), (b"a", large), (b"b", Cancel(1)), (b"b", Cancel(2))]


def test_bytes_of_all_clients_are_bounded(monkeypatch) -> None:
    """Small messages count too, and Cancels are taken all the same."""
    monkeypatch.setattr(fairness, "ALL_BYTES", 3 * CLIENT_BYTES)
    half = Generate(0, prompt="x" * (CLIENT_BYTES // 2))
    inbox = EngineInbox()
    assert [inbox.put(b"%d" % i, half) for i in range(7)] == [True] * 5 + [False] * 2
    one = Generate(0, prompt="", sampling=Sampling())
    inbox = EngineInbox()
    monkeypatch.setattr(fairness, "ALL_BYTES", 1 << 20)
    assert 100 < sum(inbox.put(b"a", one) for _ in range(3000)) < 2000
    assert inbox.put(b"a", Cancel(0))


def test_stop_wakes_the_waiting_thread() -> None:
    inbox = EngineInbox()
    inbox.put(b"a", Cancel(0))
    assert inbox.get(60.0) == (b"a", Cancel(0))
    woken = threading.Event()

    def wait() -> None:
        assert inbox.get(60.0) is None
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    inbox.stop()
    thread.join(10.0)
    assert woken.is_set()
    assert not inbox.put(b"a", Cancel(1))
    assert inbox.get(0.0) is None
    assert inbox.stopped
