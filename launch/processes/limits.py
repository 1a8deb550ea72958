"""How long the supervisor waits for its children, and how often it restarts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds, except where a comment names another unit; the defaults are what an engine uses.
    `stopped_checks`, `silent_checks` and `start_checks` count checks in a row, one every `check_interval`, so
    that only time counts in which the supervisor itself was running."""

    loader_silence: float = 300.0  # without a message; a cold disk may take long for the first bytes
    ready: float = 300.0  # of coordinator, workers and prefetcher: backbone read, costs measured
    check_interval: float = 0.5
    stopped_checks: int = 6  # of a process that is stopped: then it counts as hung
    silent_checks: int = 10  # of a coordinator that sends no heartbeat after its Ready
    engine_silence: float = 60.0  # without progress of a coordinator's engine thread after its Ready
    start_checks: int = 120  # of a process that has sent nothing yet: its imports take a while
    early: float = 30.0  # after Ready: a coordinator that exits before that has exited early
    coordinator_exits: int = 5  # number of early exits in a row that end the engine
    files_interval: float = 5.0  # between checks that the engine's files exist
    futile_exits: int = 8  # in a row, of one worker or prefetcher before it worked, while no worker did
    first_pause: float = 0.1  # before the second restart in a row, doubled before each further one
    longest_pause: float = 5.0

    def pause(self, early_exits: int) -> float:
        """Before the next restart: none before the first."""
        if early_exits < 2:
            return 0.0
        return min(self.longest_pause, self.first_pause * 2.0 ** min(early_exits - 2, 64))
