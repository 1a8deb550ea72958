"""The command line: runs a command and returns its exit code: 0 done, 2 wrong usage or input, 1 any other
error, an interrupted answer among them. An error is one line on stderr; stdout holds answers alone. A command
ends quietly when the reader of its stdout closes it (`| head`)."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING

from launch.command_line.options import Options, parse
from launch.errors import LaunchError, system_reason
from launch.terminal.output import unblock_stderr
from pipeline.errors import UsageError
from protocol.errors import ProtocolError, RequestFailed
from protocol.program import REPAIR
from shm.errors import NotEnoughMemory, ShmError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from launch.terminal.interrupts import Interrupts

    Command = Callable[[Options, Interrupts], Awaitable[int]]

# Where each command's function is, which has the command's name.
MODULES = {
    **{name: f"launch.{name}" for name in ("calibrate", "generate", "serve")},
    **{name: f"launch.{name}.command" for name in ("chat", "stress", "bench", "doctor", "cache", "advise")},
    "cluster": "launch.cluster.command",
    "score": "launch.score.command",
    "evaluate": "launch.score.evaluate",
    "replay": "launch.bench.replay",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command, by default that of the command line; returns the exit code."""
    _open_standard_streams()
    unblock_stderr()
    try:
        return _run(parse(sys.argv[1:] if arguments is None else arguments))
    except (UsageError, NotEnoughMemory) as e:
        return _complain(str(e), 2)
    except RequestFailed as e:
        return _complain(str(e), 2 if e.usage else 1)
    except LaunchError as e:
        return _complain(str(e), e.exit_code)
    except (ProtocolError, ShmError) as e:
        return _complain(str(e), 1)
    except ModuleNotFoundError as e:
        return _complain(f"the Python package {e.name} is missing; {REPAIR}", 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for buffered output, which has no reader either
        return 0
    except OSError as e:  # a full disk, no free descriptor: nothing that a traceback explains
        return _complain(system_reason(e), 1)


def _open_standard_streams() -> None:
    """Open /dev/null for a closed standard stream, whose number, and so output, a socket could get."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: fd
            setattr(sys, name, TextIOWrapper(os.fdopen(fd, "rb" if fd == 0 else "wb", closefd=False)))


def _run(options: Options) -> int:
    # Imported here, so that --help and a mistyped option are answered at once.
    import asyncio

    import uvloop

    from launch.terminal.interrupts import Interrupts
    from launch.terminal.log import start_logging

    start_logging(options.log_level)
    options = _with_model(options)

    async def with_interrupts() -> int:
        interrupts = Interrupts()
        with interrupts.installed():
            try:
                return await _command(options)(options, interrupts)
            except asyncio.CancelledError:
                return _complain("interrupted", 1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_interrupts())


def _with_model(options: Options) -> Options:
    """Resolves a Hub's model to its folder; a download may take hours, so policies are checked before."""
    if "model" not in options.written:
        return options
    from launch.hub import model_folder
    from pipeline.policies.presets import make_policy

    for request in options.policies():
        if request.name:  # the command refuses a list with a gap, with the whole list
            make_policy(request, options.config().seed)
    model = model_folder(options.written["model"], download=options.command not in ("doctor", "advise"))
    return replace(options, written=options.written | {"model": model})


def _command(options: Options) -> Command:
    """Imports only the module of this command."""
    name = "replay" if "replay" in options.written else options.command or "chat"
    command: Command = getattr(import_module(MODULES[name]), name)
    return command


def _complain(text: str, exit_code: int) -> int:
    from launch.terminal.log import complain

    complain(text)
    return exit_code
