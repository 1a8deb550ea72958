"""Calibrate in a running engine: other requests wait, Cancel ends it, and the engine is unchanged
afterwards."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from launch.processes.supervisor import Supervisor
from pipeline.calibration.file import calibration_path, load
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import Calibrating
from protocol.program import user_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(range(10, 40))
IDS = tuple(np.random.default_rng(0).integers(3, 4000, 8000).tolist())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(start_engine, tiny_model: Path) -> AsyncIterator[tuple[Supervisor, Client]]:
    config = EngineConfig(
        model=tiny_model, policy="on-demand", tile=32, workers=1, expert_cache=0.5, chunk=64, context=128
    )
    async with start_engine(config) as started:
        yield started


@pytest.fixture
def client(engine: tuple[Supervisor, Client]) -> Client:
    return engine[1]


@pytest.fixture
def endpoint(engine: tuple[Supervisor, Client]) -> str:
    return engine[0].endpoint


@pytest.fixture
def path(tiny_model: Path) -> Iterator[Path]:
    path = calibration_path(user_folder("CACHE"), open_model(tiny_model))
    yield path
    shutil.rmtree(path.parent, ignore_errors=True)  # other tests find no calibrated model


class Begun:
    """A calibration that has begun, in a task."""

    def __init__(self, client: Client, tokens: int) -> None:
        self.stages: list[Calibrating] = []
        self._far = asyncio.Event()
        self.task = asyncio.create_task(
            client.calibrate(token_ids=IDS, tokens=tokens, on_progress=self._progress)
        )

    def _progress(self, far: Calibrating) -> None:
        self.stages.append(far)
        self._far.set()

    async def under_way(self) -> None:
        async with asyncio.timeout(30):
            await self._far.wait()


async def test_calibration_leaves_policy_and_counters_unchanged(client: Client, path: Path) -> None:
    before = await client.stats()
    expected = await client.generate(token_ids=PROMPT, max_tokens=8, ignore_eos=True).result()
    await Begun(client, 300).task
    after = await client.stats()
    assert after["counted_tokens"] - before["counted_tokens"] == len(PROMPT) + 7  # the last is not computed
    assert (after["policy"], after["policy_options"]) == (before["policy"], before["policy_options"])
    assert after["engine"]["prefill"]["rows"] - before["engine"]["prefill"]["rows"] == len(PROMPT)
    assert after["scheduler"]["kv_tokens_used"] == 0
    answer = await client.generate(token_ids=PROMPT, max_tokens=8, ignore_eos=True).result()
    assert answer.tokens == expected.tokens


async def test_measured_requests_are_not_counted(client: Client, path: Path) -> None:
    """Neither those of a policy that is not counted, nor a calibration's own."""
    await client.set_policy("all-host", counted=False)
    before = (await client.stats())["counted_tokens"]
    await client.generate(token_ids=PROMPT, max_tokens=2, ignore_eos=True).result()
    assert (await client.stats())["counted_tokens"] == before
    await client.set_policy("on-demand")
    for _ in range(8):
        await client.generate(token_ids=IDS[:100], max_tokens=1, ignore_eos=True).result()
    done = await client.calibrate(token_ids=IDS[:600])
    assert (await client.stats())["counted_tokens"] == before + 800
    assert done.summary["tokens"] == 600


async def test_requests_wait_and_other_messages_are_answered(client: Client, endpoint: str) -> None:
    async with Client.connect(endpoint) as other:
        expected = await other.generate(token_ids=PROMPT, max_tokens=90, ignore_eos=True).result()
        running = asyncio.create_task(
            other.generate(token_ids=PROMPT, max_tokens=90, ignore_eos=True).result()
        )
        begun = Begun(client, 8000)
        await begun.under_way()
        asked = asyncio.create_task(other.generate(token_ids=PROMPT, max_tokens=3, ignore_eos=True).result())
        stats = await other.stats()
        assert stats["policy"] == "all-host"
        with pytest.raises(RequestFailed, match="is being calibrated; set the policy when"):
            await other.set_policy("all-host")
        with pytest.raises(RequestFailed, match="another calibration is running"):
            await other.calibrate(token_ids=IDS)
        given_up = other.generate(token_ids=PROMPT, max_tokens=3, ignore_eos=True)
        await given_up.cancel()
        assert (await given_up.result()).done.reason == "cancelled"  # without waiting for it
        assert not asked.done()
        assert not begun.task.done()
        begun.task.cancel()
        assert (await running).tokens == expected.tokens
        assert (await asked).tokens == expected.tokens[:3]


@pytest.mark.parametrize("leaves", [False, True])
async def test_cancel_or_disconnect_ends_a_calibration(client, endpoint, path, leaves) -> None:
    async with Client.connect(endpoint) as other:
        begun = Begun(other, 8000)
        await begun.under_way()
        if not leaves:
            begun.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await begun.task
    if leaves:
        with pytest.raises(Exception, match="closed"):
            await begun.task
    async with asyncio.timeout(20):  # far less than it would have taken
        await client.generate(token_ids=PROMPT, max_tokens=3, ignore_eos=True).result()
    stats = await client.stats()
    assert stats["policy"] == "on-demand"
    assert stats["scheduler"]["kv_tokens_used"] == 0
    assert not path.parent.exists() or list(path.parent.glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"token_ids": IDS[:255]}, "the text has 255 tokens, calibrating needs 256"),
        ({"text": "too short"}, "calibrating needs 256"),
        ({"token_ids": (*IDS[:300], 4096)}, "token id 4096 is outside the vocabulary of 4096"),
        ({"token_ids": (-1,)}, "token id -1 is outside"),
        ({"token_ids": IDS, "tokens": 0}, "tokens must be at least 1"),
        ({}, "exactly one of text and token_ids"),
        ({"text": "a", "token_ids": (1,)}, "exactly one of text and token_ids"),
    ],
)
async def test_invalid_calibrations_are_refused(client: Client, asked: dict, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failure:
        await client.calibrate(**asked)
    assert failure.value.usage
    assert (await client.stats())["policy"] == "on-demand"


async def test_quantized_backbone_is_calibrated_without_sensitivities(start_engine, tiny_model, path) -> None:
    config = EngineConfig(
        model=tiny_model, policy="all-host", workers=0, backbone_dtype="int8", context=128, chunk=64
    )
    async with start_engine(config) as (_, client):
        done = await client.calibrate(token_ids=IDS, tokens=300)
    calibration = load(path)
    assert calibration.sensitivity is None
    assert calibration.threshold is None
    assert calibration.needed is None
    assert calibration.first_gate is not None
    (note,) = done.summary["notes"]
    assert "--backbone-dtype" in note
    assert done.summary["single_expert_share"] is None


def damage(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(b"\0" * 100)
    path.chmod(0o600)


async def test_damaged_calibration_refuses_only_policies_that_need_it(client: Client, path: Path) -> None:
    damage(path)
    for name in ("layerwise", "on-demand"):
        await client.set_policy(name)
    with pytest.raises(RequestFailed, match="calibrat"):
        await client.set_policy("dali")
    assert (await client.stats())["policy"] == "on-demand"


async def test_model_with_one_expert_per_token_is_calibrated(start_engine, tiny_model, tmp_path) -> None:
    """The gate cannot drop an expert; all other arrays are found."""
    folder = tmp_path / "single"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    asked = EngineConfig(model=folder, workers=1, expert_cache=0.5, chunk=64, context=128)
    kept = calibration_path(user_folder("CACHE"), open_model(folder))
    async with start_engine(asked) as (_, client):
        done = await client.calibrate(token_ids=IDS, tokens=400)
        assert Path(done.path) == kept
        for name in ("adapmoe", "dali", "daop"):
            await client.set_policy(name)
            answer = await client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True).result()
            assert answer.done.reason == "length"
    found = load(kept)
    shutil.rmtree(kept.parent)
    assert found.threshold == 0
    assert found.decode_counts.sum() > 0
