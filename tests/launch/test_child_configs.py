"""What the children of an engine are configured with, on any machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.processes.child_configs import ChildConfigs
from launch.processes.cores import Cores, Thread
from pipeline.config import EngineConfig, ResolvedConfig

TWO_NODES = Cores(tuple(Thread(number // 2, (number,), number) for number in range(4)))


@pytest.mark.parametrize(
    ("workers", "sizes", "nodes"),
    [(2, [2, 2], 2), (3, [1, 1, 2], 2), (1, [4], 1), (0, [], 2)],
    ids=["a worker a node", "more workers", "one across both", "none"],
)
def test_coordinator_counts_nodes_where_each_worker_lies_on_one(
    workers: int, sizes: list[int], nodes: int
) -> None:
    path = Path("/m")
    config = ResolvedConfig(**vars(EngineConfig(model=path, name="n", workers=workers)))
    runtime = cast(Any, SimpleNamespace(name="n", path=Path("/r")))
    configs = ChildConfigs(config, path, TWO_NODES, runtime, True, 0, "WARNING", path, b"k")
    found = configs.for_coordinator("f" * 64)
    assert sorted(found["workers"]) == sizes
    assert found["nodes"] == nodes
