"""EngineInbox: in order for each client, in turns between accounts and between clients, bounded."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pipeline import accounts
from pipeline.accounts import ACCOUNT_BYTES, CLIENT_BYTES, ID_BYTES, LOCAL, client_name
from pipeline.serving.engine_inbox import LIMIT, ClientGone, EngineInbox, EngineMessage
from protocol.messages import Calibrate, Cancel, ChatMessage, Generate, Sampling, Score, SetPolicy


def drained(inbox: EngineInbox) -> list[tuple[bytes, EngineMessage]]:
    items = []
    while (item := inbox.get(0.0)) is not None:
        items.append(item)
    return items


def test_flooding_client_waits_behind_its_own_messages() -> None:
    inbox = EngineInbox()
    for i in range(4):
        inbox.put(b"a", Cancel(i))
    inbox.put(b"b", Cancel(10))
    inbox.put(b"b", Cancel(11))
    order = [message.request for _, message in drained(inbox)]
    assert order == [0, 10, 1, 11, 2, 3]


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
    for i in range(LIMIT):
        assert inbox.put(b"a", Cancel(i))
    assert not inbox.put(b"a", Cancel(LIMIT))
    assert inbox.put(b"b", Cancel(0))
    items = drained(inbox)
    assert [message.request for client, message in items if client == b"a"] == list(range(LIMIT))
    assert [index for index, (client, _) in enumerate(items) if client == b"b"] == [1]


def test_large_messages_of_one_client_are_bounded() -> None:
    """By the bytes of their texts and ids. A single message of any size is taken."""
    half = "x" * (CLIENT_BYTES // 2)
    ids = (1,) * (CLIENT_BYTES // ID_BYTES // 2 + 1)
    turn = ChatMessage("user", "x")
    for large in (
        Generate(0, prompt=half),
        Generate(0, messages=(turn, ChatMessage(half, ""))),
        Generate(0, messages=(turn, ChatMessage("", half))),
        Generate(0, prompt="", conversation=half),
        Generate(0, prompt="", stop=("x", half)),
        Generate(0, token_ids=ids),
        Score(0, text=half),
        Calibrate(0, token_ids=ids),
        Calibrate(0, text="", starts=ids),
        SetPolicy(0, half),
        SetPolicy(0, "x", {half: "1"}),
        SetPolicy(0, "x", {"a": half}),
    ):
        inbox = EngineInbox()
        assert inbox.put(b"a", Generate(0, prompt=half + half + "x"))
        assert not inbox.put(b"a", large), large.__class__
        assert inbox.put(b"b", large)
        drained(inbox)
        assert inbox.put(b"a", large)  # messages that were taken out no longer count
        assert not inbox.put(b"a", Generate(1, resume=ids))


def test_account_with_many_clients_delays_no_other_account() -> None:
    inbox = EngineInbox()
    names = [client_name(b"key", b"%d" % i) for i in range(3)]
    for name in names:
        inbox.put(name, Cancel(0))
        inbox.put(name, Cancel(1))
    other, others = client_name(LOCAL, b"x"), client_name(LOCAL, b"y")
    for message in (Cancel(2), Cancel(3)):
        inbox.put(other, message)
    inbox.put(others, Cancel(4))
    order = [client for client, _ in drained(inbox)]
    assert order[:6] == [names[0], other, names[1], others, names[2], other]
    assert order[6:] == names


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


def test_bytes_of_an_account_and_of_all_remote_clients_are_bounded(monkeypatch) -> None:
    """What remote clients hold never keeps local ones out."""
    monkeypatch.setattr(accounts, "REMOTE_BYTES", 3 * ACCOUNT_BYTES)
    half = Generate(0, prompt="x" * (CLIENT_BYTES // 2))
    inbox = EngineInbox()
    taken = {
        account: sum(inbox.put(client_name(account, b"%d" % i), half) for i in range(40))
        for account in (b"first", b"second", b"third", b"fourth", b"fifth", LOCAL)
    }
    most = ACCOUNT_BYTES * 2 // CLIENT_BYTES - 1
    assert taken == {
        b"first": most, b"second": most, b"third": most, b"fourth": 2, b"fifth": 0,
        LOCAL: accounts.LOCAL_BYTES * 2 // CLIENT_BYTES - 1,
    }  # fmt: skip


def test_small_messages_count_too_and_cancels_are_taken_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(accounts, "ACCOUNT_BYTES", 1 << 20)
    inbox = EngineInbox()
    one, name = Generate(0, prompt="", sampling=Sampling()), client_name(b"key", b"1")
    assert 100 < sum(inbox.put(name, one) for _ in range(3000)) < 2000
    assert inbox.put(name, Cancel(0))


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
