"""Landings that the device waits for by itself: it computes a demanded tile as soon as the tile's flag says
that it has landed (`shm/landing_flags.py`), with no message and no thread in between.

A device that waits is always released. The engine's thread, which makes it wait, learns of each landing from
the same flags, or aborts it; until then nothing else that it does may wait for the device. If no tile lands
for some time, because the prefetcher has exited or the driver holds it up, and this thread perhaps too, a
thread here aborts what is waited for. What was computed from an aborted tile's slot is dropped, and flags are
not trusted again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shm.landing_flags import LandingFlags, next_number

# Seconds without a landing while the device waits: more than those after which a prefetcher process that
# hangs is replaced, which ends the wait too.
GUARD_LIMIT = 4.0
GUARD_PERIOD = 0.25

log = logging.getLogger(__name__)


class Landings:
    """Of one slab. All but the guard's thread is used by the engine's thread alone."""

    def __init__(
        self,
        flags: LandingFlags,
        wait: Callable[[int, int], None],
        *,
        limit: float = GUARD_LIMIT,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wait(slot, number)`: all work that the device gets from now on waits for this flag. `ready`: the
        device may wait by now. Until then flags are only read."""
        self.trusted = True  # no wait had to be aborted by the guard
        self.waiting: dict[int, int] = {}  # slot -> number; the guard's thread reads it
        self.limit = limit
        self._flags, self._wait, self._ready = flags, wait, ready
        self._numbers = flags.array[: flags.slots].tolist()  # of each slot's latest order
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="landing-guard", daemon=True)
        self._thread.start()

    @property
    def may_wait(self) -> bool:
        """The device may wait for flags."""
        return self.trusted and self._ready()

    def issue(self, slot: int) -> int:
        """The number of the slot's next order."""
        self._numbers[slot] = number = next_number(self._numbers[slot])
        return number

    def landed(self, slot: int, number: int) -> bool:
        """The order of this number has landed in its slot."""
        return self._flags.landed(slot, number)

    def wait(self, slot: int, number: int) -> None:
        """The device waits for this landing with all work that it gets from now on. `settle` must follow."""
        self.waiting[slot] = number
        self._wait(slot, number)

    def settle(self, slot: int) -> None:
        """The slot's order has landed, or ended: the device does not wait for it from now on."""
        number = self.waiting.get(slot)
        if number is not None and not self._flags.landed(slot, number):
            self._flags.abort(slot, number)
        self.waiting.pop(slot, None)

    def close(self) -> None:
        """The engine ends: nothing is waited for any more."""
        self._ended.set()
        self._thread.join()
        for slot in list(self.waiting):
            self.settle(slot)

    def _guard(self) -> None:
        """The engine's thread may look for landings all the while: that releases no device."""
        seen, since = b"", time.monotonic()
        while not self._ended.wait(GUARD_PERIOD):
            now = self._flags.array[: self._flags.slots].tobytes()
            if now != seen or not self.waiting:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.limit:
                self._abort_all()

    def _abort_all(self) -> None:
        waiting = {s: n for s, n in self.waiting.copy().items() if not self._flags.landed(s, n)}
        if waiting:
            self.trusted = False  # before a device goes on
            for slot, number in waiting.items():
                self._flags.abort(slot, number)
            log.warning(
                f"the GPU has waited {self.limit:.0f} s for {len(waiting)} tiles of which none has"
                " landed: landings are reported by messages from now on"
            )
