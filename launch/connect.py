"""A command's client of an engine: of one started for it and then stopped, or of a running one. One that
reconnects when the coordinator is restarted resumes its requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from launch.command_line.checks import check_calibration, check_engine
from launch.command_line.options import Options
from launch.processes.supervisor import Supervisor
from launch.runtime import find_engine
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.config import EngineConfig
from protocol.client import Client

log = logging.getLogger("tandem")

CLIENT = "launch.py"  # the name that these clients send
RETRY_SECONDS = 60.0  # a large model's backbone is read again, and costs are measured
WAITING = f"the engine does not answer; waiting for it, {RETRY_SECONDS:.0f} s at most"
ANSWERS = "the engine answers again"


@asynccontextmanager
async def connected(options: Options, interrupts: Interrupts) -> AsyncIterator[Client]:
    """A client of `endpoint`. Raises what that and Client.connect raise."""
    async with endpoint(options, interrupts) as where, Client.connect(where, name=CLIENT) as client:
        yield client


@asynccontextmanager
async def reconnecting_client(options: Options, interrupts: Interrupts) -> AsyncIterator[Client]:
    """Logs the begin and end of a wait for the engine. Raises as `endpoint` and Client.connect."""
    async with (
        endpoint(options, interrupts) as where,
        Client.connect(where, name=CLIENT, retry=RETRY_SECONDS) as client,
    ):
        client.on_pause = lambda lost: log.warning(WAITING)
        client.on_reconnect = lambda: log.warning(ANSWERS)
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
    async with AsyncExitStack() as stack:
        if "cluster" in options.written:
            supervisor = await _of_cluster(options, config, interrupts, stack)
        else:
            supervisor = Supervisor(config, log_level=options.log_level)
            interrupts.at_once(supervisor.kill)
        await stack.enter_async_context(supervisor)
        if supervisor.http:
            notice(f"HTTP is served at {supervisor.http} (for OpenAI's clients: {supervisor.http}/v1)")
        yield supervisor


async def _of_cluster(
    options: Options, config: EngineConfig, interrupts: Interrupts, stack: AsyncExitStack
) -> Supervisor:
    """Returns the supervisor of an engine whose experts lie on several machines; their expert hosts run until
    the stack ends."""
    from launch.cluster.placing import placed
    from launch.cluster.share import share

    shared = await share(options, config)
    for line in shared.lines():
        notice(line)
    supervisor = Supervisor(shared.config, log_level=options.log_level, machines=shared.machines)
    interrupts.at_once(supervisor.kill)
    await stack.enter_async_context(placed(shared, supervisor.name, supervisor.set_machines))
    return supervisor
