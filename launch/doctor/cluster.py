"""`launch.py doctor --cluster`: the machines of a cluster, as Ray and a measurement of now show them:
versions, kernels, memory, and the way to each. With `--model` also who would hold what of it, and what the
loss of each machine costs. Exit code 0: all machines can take part, and the model fits; 1: not."""

from __future__ import annotations

from typing import Any

from launch.cluster.cluster import Cluster, differing
from launch.cluster.share import Share, lost, share
from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.errors import LaunchError
from launch.terminal.format import rate
from launch.terminal.log import notice
from launch.terminal.output import print_json
from launch.terminal.tables import Column, Table, print_parts
from pipeline.errors import UsageError
from shm.segment import byte_size

Row = tuple[str, dict[str, Any]]


async def show_cluster(options: Options) -> int:
    """Examine the cluster of --cluster. Raises LaunchError where it is not reached, WrongUsage."""
    if "model" in options.written:
        check_engine(options.config())
    there = Cluster.of(options, options.written["cluster"])
    notice("looking at the machines, and measuring: a moment")
    ports = options.written.get("host_ports", (0, 0))
    looks = await there.look(options.written.get("model"), again=True, ports=ports)
    wrong = [*differing(looks).values(), *(look["way"] for look in looks.values() if "way" in look)]
    shared, refusal = None, ""
    if "model" in options.written and not wrong:
        try:
            shared = await share(options, options.config())
        except (LaunchError, UsageError) as e:
            refusal = str(e)
    wrong += [refusal] if refusal else []
    if "json" in options.written:
        print_json({"ok": not wrong, "problems": wrong, "machines": looks, "model": _model(shared)})
    else:
        print_parts(_table(sorted(looks.items())), "", *wrong, *_lines(shared))
    return 1 if wrong else 0


def _table(rows: list[Row]) -> Table[Row]:
    def measured(name: str, unit: float) -> Any:
        return lambda row: f"{row[1][name] * unit:,.0f}" if name in row[1] else "-"

    return Table(
        [
            Column[Row]("machine", lambda row: row[0], text=True, style="bold"),
            Column("kernels", lambda row: row[1].get("variant", "-")),
            Column("cores", lambda row: row[1].get("cores", "-")),
            Column("memory\nfree", lambda row: _of(row, "memory", byte_size)),
            Column("/dev/shm\nfree", lambda row: _of(row, "shm", byte_size)),
            Column("reads", lambda row: _of(row, "rate", rate)),
            Column("round trip\nus", measured("trip", 1e6)),
            Column("link\nMbit/s", measured("link", 8e-6)),
        ],
        rows,
    )


def _of(row: Row, name: str, shown: Any) -> str:
    return str(shown(row[1][name])) if name in row[1] else "-"


def _lines(shared: Share | None) -> list[str]:
    if shared is None:
        return []
    return [*shared.lines(), *(f"the loss of {name}: {cost}" for name, cost in lost(shared))]


def _model(shared: Share | None) -> dict[str, Any] | None:
    if shared is None:
        return None
    return {
        "format": shared.config.format,
        "bounds": list(shared.division.bounds),
        "lanes": dict(zip(shared.names, map(list, shared.division.parts), strict=True)),
        "loss": dict(lost(shared)),
    }
