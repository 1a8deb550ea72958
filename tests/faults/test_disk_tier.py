"""An engine of which half the experts are in memory, and the others on disk: its answers have the bits of one
that has all in memory, whoever is killed; an expert that cannot be read ends the requests that need it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_engines import KILL, LIMIT, LONG, STOP, answer, bits, same

from launch.errors import StartFailed
from pipeline.config import EngineConfig
from pipeline.errors import UsageError
from protocol.client import Client
from protocol.errors import RequestFailed
from shm.segment import allocated_bytes
from shm.store import store_segments

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

LAYERS, EXPERTS, HIDDEN = 6, 8, 128
EXPERT = 3 * HIDDEN * HIDDEN * 4  # bytes
HALF = LAYERS * EXPERTS * EXPERT // 2
SHAPE = {
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2600,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAULTS = {
    "the reader stopped": [(STOP, "reader", 0)],
    "a worker stopped, the reader killed": [(STOP, "worker", 0), (KILL, "reader", 0)],
}


def half_on_disk(folder: Path, **options: Any) -> EngineConfig:
    """With half of the experts in memory."""
    path = folder / "config.json"
    path.write_text(json.dumps(SHAPE))
    sizes: dict[str, Any] = {"workers": 2, "chunk": 64, "max_sequences": 4, "host_memory": HALF}
    formats: dict[str, Any] = {"format": "f32", "backbone_dtype": "f32", "context": 512, "speculate": "off"}
    return EngineConfig(model=Path(f"shape:{path}"), device="cpu", **sizes, **formats, **options)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory) -> EngineConfig:
    return half_on_disk(tmp_path_factory.mktemp("shape"), policy="all-host")


async def _disk(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = (await client.stats())["disk"]
    return found


async def test_answers_have_the_bits_of_experts_in_memory(reference, state) -> None:
    assert bits(await answer(state.client)) == bits(reference[0])
    assert bits(await answer(state.client, LONG, 8)) == bits(reference[1])
    disk = await _disk(state.client)
    assert disk["misses"] > 0
    assert disk["resident_experts"] <= disk["capacity_experts"] == LAYERS * EXPERTS // 2
    (store,) = store_segments()
    assert allocated_bytes(store) < HALF + 2 * EXPERT


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_answer_changes_by_a_bit_when_processes_end(reference, state, fault: str) -> None:
    def happens() -> None:
        for number, role, index in FAULTS[fault]:
            state.send(number, role, index)

    assert bits(await answer(state.client, fault=happens)) == bits(reference[0])
    await state.wait_recovered()


@contextmanager
def shortened(path: Path) -> Iterator[None]:
    """Most of a file is missing during the block."""
    content = path.read_bytes()
    os.truncate(path, len(content) // 8)
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.write(content)


async def test_an_expert_that_cannot_be_read_ends_the_requests_that_need_it(reference, state) -> None:
    with shortened(Path((await _disk(state.client))["file"])):
        with pytest.raises(RequestFailed, match=r"cached store .*store\.bin became shorter") as failed:
            await answer(state.client, LONG, 8)
        assert "\n" not in str(failed.value)
    assert bits(await answer(state.client, LONG, 8)) == bits(reference[1])
    assert bits(await answer(state.client)) == bits(reference[0])
    assert (await _disk(state.client))["failed"] > 0


async def _refused(start_engine: Callable[..., Any], config: EngineConfig) -> str:
    with pytest.raises((StartFailed, UsageError)) as refused:
        async with start_engine(config):
            pass
    return str(refused.value)


async def test_a_start_that_cannot_have_experts_on_disk_says_why(
    start_engine, on_disk, tmp_path, monkeypatch
) -> None:
    least = await _refused(start_engine, replace(on_disk, host_memory=EXPERT))
    assert "the experts of two layers must fit" in least
    floe: dict[str, Any] = {"policy": "floe", "format": "floe-u8", "host_memory": HALF // 2}
    device = await _refused(start_engine, replace(on_disk, **floe))
    assert "has the up matrices of all experts on the device" in device
    folder = tmp_path / "cache"
    folder.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    line = await _refused(start_engine, on_disk)
    assert "must be on disk, and" in line
    assert "\n" not in line


async def test_a_restarted_coordinator_begins_without_experts_in_memory(reference, state) -> None:
    async with Client.connect(state.supervisor.endpoint, name="tests", retry=LIMIT) as client:
        resumed = await answer(client, fault=lambda: state.send(KILL, "coordinator"))
        assert same(resumed, reference[0])
        assert bits(await answer(client)) == bits(reference[0])
        disk = await _disk(client)
        assert 0 < disk["read"] <= disk["misses"] + disk["predicted"]
