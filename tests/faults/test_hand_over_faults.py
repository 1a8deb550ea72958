"""The coordinator and a worker are killed at each step of a layer's hand-over between device and workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_engines import answer, config, same
from fork_server import EXIT_AT

from launch.processes.monitor import Limits
from protocol.client import Client

pytestmark = pytest.mark.timeout(300)  # restarts of engines, on a machine that may be busy

RESTARTED = 60.0  # seconds for a restart of the engine
STEPS = (
    "pipeline.backbone.backbone:EagerLayers:attend",
    "pipeline.backbone.backbone:EagerLayers:read",
    "pipeline.experts.pool:HostPool:submit",
    "pipeline.experts.device_share:DeviceMemory:begin",
    "pipeline.experts.device_share:DeviceMemory:compute",
    "pipeline.experts.pool:HostPool:parts",
    "pipeline.backbone.backbone:EagerLayers:add",
    "pipeline.backbone.backbone:EagerLayers:answers",
    "workers.kernels.native:WorkKernel:compute",
)


async def test_a_kill_at_any_step_changes_no_token(
    start_engine, tiny_model, tmp_path: Path, monkeypatch
) -> None:
    place = tmp_path / "exit"
    place.with_suffix(".steps").write_text("\n".join(STEPS))
    monkeypatch.setenv(EXIT_AT, str(place))
    limits = Limits(coordinator_exits=100)
    # Half of the layers' experts are the device's, the others the workers'.
    async with (
        start_engine(config(tiny_model, policy="layerwise"), limits) as (supervisor, _),
        Client.connect(supervisor.endpoint, retry=RESTARTED) as client,
    ):
        reference = await answer(client)
        for number, step in enumerate(STEPS):
            when = f"{step} {('before', 'after')[number % 2]}"
            found = await answer(client, fault=lambda when=when: place.write_text(when))  # type: ignore[misc]
            assert same(found, reference), when
            assert not place.exists(), when
