"""The queue of the engine's thread: in order for each client, in turns between them, bounded."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.engine_inbox import LIMIT, EngineInbox


def drained(calls: EngineInbox[list[str]]) -> list[str]:
    made: list[str] = []
    while (call := calls.get(0.0)) is not None:
        call(made)
    return made


def test_a_flood_waits_behind_itself() -> None:
    calls: EngineInbox[list[str]] = EngineInbox()
    for i in range(4):
        calls.put(b"a", lambda made, i=i: made.append(f"a{i}"))
    calls.put(b"b", lambda made: made.append("b0"))
    calls.put(b"b", lambda made: made.append("b1"))
    assert drained(calls) == ["a0", "b0", "a1", "b1", "a2", "a3"]


@given(st.text("abc", max_size=40))
def test_each_client_s_calls_come_once_and_in_order(clients: str) -> None:
    calls: EngineInbox[list[str]] = EngineInbox()
    for number, client in enumerate(clients):
        calls.put(client.encode(), lambda made, word=f"{client}{number}": made.append(word))
    made = drained(calls)
    for client in "abc":
        sent = [f"{c}{n}" for n, c in enumerate(clients) if c == client]
        assert [word for word in made if word[0] == client] == sent
    assert len(made) == len(clients)


def test_only_the_client_that_sends_too_much_is_refused() -> None:
    calls: EngineInbox[list[str]] = EngineInbox()
    for _ in range(LIMIT):
        assert calls.put(b"a", lambda made: made.append("a"))
    assert not calls.put(b"a", lambda made: made.append("refused"))
    assert calls.put(b"a", lambda made: made.append("gone"), always=True)
    assert calls.put(b"b", lambda made: made.append("b"))
    made = drained(calls)
    assert (made.count("a"), made.count("b"), made[-1]) == (LIMIT, 1, "gone")
    assert made.index("b") == 1


def test_the_end_comes_at_once_whatever_waits() -> None:
    calls: EngineInbox[list[str]] = EngineInbox()
    ended = threading.Event()

    def wait() -> None:
        assert calls.get(60.0) is None
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    calls.stop()
    thread.join(10.0)
    assert ended.is_set()
    calls.put(b"a", lambda made: made.append("a"))
    assert calls.get(0.0) is None
    assert calls.stopped
