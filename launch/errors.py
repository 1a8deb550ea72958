"""Errors of the launch package, each with when it is raised; their texts are one line for a person."""

from __future__ import annotations


class LaunchError(Exception):
    """Base of this package's errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class WrongUsage(LaunchError):
    """The command line or a file that it names is at fault."""

    exit_code = 2


class DownloadFailed(LaunchError):
    """A model cannot be downloaded now: no network, no room on the disk, a Hub that is down."""


class StartFailed(LaunchError):
    """A child could not begin its work, ended early, or took too long; nothing of the engine is left."""

    def __init__(self, text: str, usage: bool = False) -> None:
        super().__init__(text)
        self.exit_code = 2 if usage else 1


class EngineDied(LaunchError):
    """A child of a running engine ended unexpectedly; the rest has been stopped."""


class OutputFailed(LaunchError):
    """A file could not be written (the disk is full, say); nothing of it is left."""


class AnswerLost(LaunchError):
    """The engine ended an answer that had begun."""


class Disturbed(LaunchError):
    """Something else used the engine during a measured run, so its figures say nothing."""
