"""Errors of the launch package. Each message is one line."""

from __future__ import annotations

import os


def system_reason(error: OSError) -> str:
    """Tells why the system refused something, with the file: "/run/x: No space left on device"."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


class LaunchError(Exception):
    """Base of this package's errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class WrongUsage(LaunchError):
    """The command line or a file that it names is at fault."""

    exit_code = 2


class DownloadFailed(LaunchError):
    """A model cannot be downloaded now: no network, a full disk, the Hub is down."""


class StartFailed(LaunchError):
    """A child failed, exited or was too slow before the engine was ready; nothing of the engine remains."""

    def __init__(self, text: str, usage: bool = False) -> None:
        super().__init__(text)
        self.exit_code = 2 if usage else 1


class EngineFailed(LaunchError):
    """A child of a running engine exited and could not be restarted; the engine was stopped."""


class OutputFailed(LaunchError):
    """A file could not be written (a full disk, say); nothing of it remains."""


class AnswerLost(LaunchError):
    """The engine cancelled an answer that had begun."""


class Disturbed(LaunchError):
    """Other clients used the engine during a measured run, which makes its figures useless."""
