"""The first moments of a command, until it can be interrupted in order: a Ctrl-C while modules are imported
is one line and the end, since nothing is there yet that must be stopped. Imports next to nothing, and runs
with an old Python.

An interpreter's own start is before this; who starts one with SIGINT blocked has the Ctrl-C answered here:
`make run`, and launch.py where it goes on with another Python.
"""

import _signal  # type: ignore[import-not-found]  # `signal` itself takes a while to import
import os
import sys


def catch_interrupts() -> None:
    """End the process at a Ctrl-C, and at once if one was held back."""
    _signal.signal(_signal.SIGINT, _end)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])


def hold_interrupts() -> None:
    """Keep a Ctrl-C for the program that takes this process over."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])


def main() -> int:
    """Run the command of the command line; returns the exit code."""
    catch_interrupts()
    from launch.cli import main as run

    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # KeyboardInterrupt, which `run` answers
    return run()


def _end(number: int, frame: object) -> None:
    os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode("utf-8", "replace"))
    os._exit(1)
