"""Requests to a model with recurrent states: a state cannot be cut back to an earlier token, so answers are
compared with those of sequences that were computed from their first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from families import Case, save
from test_scheduler import Harness
from thread_engine import engine_in_threads

from launch.equality import Verdict, compare
from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.reading import Window, lanes
from pipeline.config import KV_BLOCK
from pipeline.engine.engine import Engine
from pipeline.errors import ShardFailed
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.messages import Done, Generate, Token

CONTEXT = 256
BOUND = 1e-3  # between float32 results of different batches and chunks

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("recurrent")
    save(Case("qwen3_next", "plain", {"max_position_embeddings": CONTEXT}), folder)
    with engine_in_threads(folder, folder) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("random", {"churn": "1"}), 1), None)
        yield engine


def ask(request: int, prompt: Sequence[int], count: int, reuse: bool = True) -> Generate:
    return Generate(request, token_ids=tuple(prompt), max_tokens=count, ignore_eos=True, reuse=reuse)


def anew(engine: Engine, message: Generate) -> list[Token]:
    """The answer, computed alone from the first token."""
    harness = Harness(engine, CONTEXT, CONTEXT)
    harness.run(
        b"c", Generate(0, token_ids=message.token_ids, max_tokens=message.max_tokens, ignore_eos=True)
    )
    return harness.answer(0)[0]


def equal(found: list[Token], reference: list[Token]) -> bool:
    tokens = [token.token for token in found]
    return len(tokens) == len(reference) and compare(tokens, reference, BOUND).verdict is not Verdict.MISMATCH


def test_next_turns_begin_at_a_snapshot_or_the_end(engine) -> None:
    """States are kept at the end, and at that of the prompt's last block but for its last few tokens."""
    prompt = [3 + 7 * i % 290 for i in range(150)]
    first = anew(engine, ask(0, prompt, 6))
    answer = [token.token for token in first]
    turns = {  # next prompt, tokens that need not be computed: of the earlier prompt and answer
        "all": ([*prompt, *answer, 50, 60], 155),  # the last token was never computed
        "another question": ([*prompt, 250, 251, 252], 128),
        "within the last block": ([*prompt[:140], 250, 251], 128),
        "the same": (prompt, 128),
        "within the first blocks": ([*prompt[:100], 250, 251], 0),
    }
    for number, (turn, reused) in enumerate(turns.values()):
        harness = Harness(engine, 2 * CONTEXT, CONTEXT)
        harness.run(b"c", ask(0, prompt, 6))
        harness.run(b"c", ask(1, turn, 5))
        tokens, done = harness.answer(1)
        assert (number, done.stats["kv_reused_tokens"]) == (number, reused)
        assert equal(tokens, anew(engine, ask(0, turn, 5))), number


def test_third_request_begins_where_the_second_went_on_otherwise(engine) -> None:
    harness = Harness(engine, 2 * CONTEXT, CONTEXT)
    prompts = [[*range(3, 103), *[200 + n] * 50] for n in range(3)]
    for number, prompt in enumerate(prompts):
        harness.run(b"c", ask(number, prompt, 3))
    assert [harness.answer(n)[1].stats["kv_reused_tokens"] for n in range(3)] == [0, 0, KV_BLOCK]
    assert equal(harness.answer(2)[0], anew(engine, ask(0, prompts[2], 3)))


def test_preempted_requests_go_on(engine) -> None:
    asked = [ask(i, range(3, 7 + i), 130 + 20 * i) for i in range(2)]
    harness = Harness(engine, CONTEXT, CONTEXT)
    for message in asked:
        harness.scheduler.enqueue(b"c", message)
    harness.finish()
    assert harness.scheduler.stats()["preemptions"] > 0
    for message in asked:
        assert equal(harness.answer(message.request)[0], anew(engine, message))


def test_requests_wait_for_a_place_for_their_states(engine) -> None:
    harness = Harness(engine, CONTEXT, CONTEXT)
    harness.scheduler.kv._places = 1
    harness.run(b"c", ask(0, range(3, 9), 3))  # what is kept of it needs no place
    for request in (1, 2):
        harness.scheduler.enqueue(b"c", ask(request, range(5, 15), 4))
    harness.scheduler.round()
    stats = harness.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["kv_snapshots"]) == (1, 1, 1)
    harness.finish()
    assert len(harness.to(b"c", Done)) == 3
    assert harness.scheduler.kv.places == 1


def test_a_failed_step_leaves_states_as_they_were(engine, monkeypatch) -> None:
    """It fails at the last layer, when the others have written. Then each request steps by itself."""
    asked = [ask(i, range(3 + i, 9 + 3 * i), 8) for i in range(2)]
    harness, layer, failed = Harness(engine, CONTEXT, CONTEXT), engine.first.driver.layer, []

    def failing(number: int, executor) -> None:
        layer(number, executor)
        if number == engine.shape.layers - 1 and len(executor.call.x) == 2 and len(failed) < 3:
            failed.append(number)
            raise ShardFailed("this step fails")

    monkeypatch.setattr(engine.first.driver, "layer", failing)
    for message in asked:
        harness.scheduler.enqueue(b"c", message)
    harness.finish()
    assert len(failed) == 3
    for message in asked:
        assert equal(harness.answer(message.request)[0], anew(engine, message))


def test_calibration_decodes_the_same_answers_again(engine) -> None:
    """Its windows go back to the end of their prompts."""
    tokens = [[3 + (7 + n) * i % 290 for i in range(100)] for n in range(2)]
    kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), CONTEXT)
    with lanes(engine, kv, [Window(ids, 60) for ids in tokens], chunk=8) as held:
        held.read_prompts(lambda _: None)
        first, again = (held.loss(lambda _: None) for _ in range(2))
    np.testing.assert_allclose(again, first, rtol=1e-6)
    assert kv.used == 0
