"""A client of an engine: of one started for this command and then stopped, or of a running one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launch.command_line.checks import check_calibration, check_engine
from launch.command_line.options import Options
from launch.processes.supervisor import Supervisor
from launch.runtime import find_engine
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from protocol.client import Client

log = logging.getLogger("tandem")

CLIENT = "launch.py"  # the name that these clients send


@asynccontextmanager
async def connected(options: Options, interrupts: Interrupts) -> AsyncIterator[Client]:
    """Raises what `endpoint` and Client.connect raise."""
    async with endpoint(options, interrupts) as where, Client.connect(where, name=CLIENT) as client:
        yield client


@asynccontextmanager
async def endpoint(options: Options, interrupts: Interrupts) -> AsyncIterator[str]:
    """The endpoint of the engine that the command line names, or of a new one. Raises WrongUsage, and as
    Supervisor."""
    if options.connect:
        yield find_engine(options.connect_name).endpoint
    else:
        async with started(options, interrupts) as engine:
            yield engine.endpoint


@asynccontextmanager
async def started(options: Options, interrupts: Interrupts) -> AsyncIterator[Supervisor]:
    """An engine with the options of the command line, for the length of the block."""
    config = options.config()
    check_engine(config)
    check_calibration(config, options.policies())
    supervisor = Supervisor(config, log_level=options.log_level)
    interrupts.at_once(supervisor.kill)
    async with supervisor:
        if supervisor.http:
            notice(f"HTTP is served at {supervisor.http} (for OpenAI's clients: {supervisor.http}/v1)")
        yield supervisor
