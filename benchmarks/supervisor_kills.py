"""SIGKILLs an engine's supervisor at random moments and measures the exit of its children and the files left.

    python -m benchmarks.supervisor_kills [--moments 50] [--seed 1] [--model DIR]

The moments are spread over five phases: start-up (the store is cached), loading (it is not), serving,
answering and shutting down. After each kill: the seconds until the last process of that engine has exited,
the files that it left, and those left after the next engine has started, answered and stopped. Runtime and
cache directories are its own. Without --model it writes a checkpoint of 3 GB, which loads in some seconds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.marked_engine import LIMIT, Engine, Place
from benchmarks.random_checkpoint import write

GONE_LIMIT = 5.0  # seconds that children may outlive their supervisor
PHASES = ("start-up", "loading", "serving", "answering", "shutting down")


@dataclass(frozen=True)
class Moment:
    """One kill. Times in seconds."""

    phase: str
    after: float  # since the phase began
    doing: str
    gone: float
    before: list[str]  # files left by the kill
    next_start: float
    left: list[str]  # after the next start


def try_moment(place: Place, name: str, phase: str, after: float) -> Moment:
    """Kill an engine so long after a phase's begin."""
    if phase == "loading":
        shutil.rmtree(place.cache / "tandem", ignore_errors=True)
    with Engine(place, name) as engine:
        if phase not in ("start-up", "loading"):
            engine.wait_ready()
        if phase == "answering":
            engine.ask(1000)
        if phase == "shutting down":
            engine.process.send_signal(signal.SIGTERM)
        time.sleep(after)
        doing, gone = engine.kill()
        before = place.remains(name)
        return Moment(phase, after, doing, gone, before, engine.next_start(), place.remains(name))


def lengths(place: Place, name: str) -> dict[str, float]:
    """How long the phases of this model take on this machine, in seconds; the last ones are endless."""
    found = {"serving": 1.0, "answering": 1.0}
    for phase in ("loading", "start-up"):  # the first run has an empty cache, the second a full one
        began = time.monotonic()
        with Engine(place, name) as engine:
            engine.wait_ready()
            found[phase] = time.monotonic() - began
            began = time.monotonic()
            engine.process.send_signal(signal.SIGTERM)
            engine.process.wait(LIMIT)
            found["shutting down"] = time.monotonic() - began
    return found


def _show(moments: list[Moment]) -> None:
    for phase in PHASES:
        times = [m.gone for m in moments if m.phase == phase]
        if times:
            print(
                f"{phase:14} {len(times):3} kills; last process gone after "
                f"{median(times) * 1000:.0f} ms (median), {max(times) * 1000:.0f} ms (longest)"
            )
    times = [m.gone for m in moments]
    late = sum(t > GONE_LIMIT for t in times)
    kinds = sorted({kind for m in moments for kind in m.before})
    print(
        f"{'all':14} {len(times):3} kills; last process gone after {median(times) * 1000:.0f} ms (median), "
        f"{max(times) * 1000:.0f} ms (longest), {late} later than {GONE_LIMIT:g} s"
    )
    print(f"left before the next start, at one moment or another: {', '.join(kinds) or 'nothing'}")
    print(
        f"left after the next start: {sum(bool(m.left) for m in moments)} times something; "
        f"next starts that failed: 0, median {median(m.next_start for m in moments):.1f} s"
    )


def _words(found: list[str]) -> str:
    return ", ".join(sorted(found)) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--options", default="--workers 2", help="more words for `launch.py serve`")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="tk-", dir="/tmp"))  # short: socket paths are
    try:
        model = arguments.model
        if model is None:
            model = folder / "model"
            write(model, layers=1, seed=0)
        place = Place(folder, model, tuple(arguments.options.split()))
        long = lengths(place, "kills")
        print("phases: " + ", ".join(f"{phase} {long[phase]:.1f} s" for phase in PHASES))
        print(f"{'phase':14} {'after':>8}  {'gone':>8}  processes | left | next start | left after it")
        moments = []
        for number in range(arguments.moments):
            phase = PHASES[number % len(PHASES)]
            m = try_moment(place, f"kills{number}", phase, chance.uniform(0.05, 1.0) * long[phase])
            moments.append(m)
            print(
                f"{m.phase:14} {m.after:6.2f} s  {m.gone * 1000:5.0f} ms  {m.doing} | {_words(m.before)} | "
                f"{m.next_start:.1f} s | {_words(m.left)}",
                flush=True,
            )
        _show(moments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
