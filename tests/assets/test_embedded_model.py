"""The embedded model loads, keeps its limits, and is as good as its card says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.embedded_model.model import Model, Shape
from pipeline.assets import heldout, model_dir
from pipeline.text.chat_output import ChatOutput
from pipeline.text.tokenizer import Tokenizer, read_template
from protocol.messages import ChatMessage

MEGABYTE = 1_000_000
WINDOW = 512  # tokens; the first of each window is context only
FIRST = 6  # windows of the card's loss of the first rows


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    return dict(json.loads((model_dir().parent / "card.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_dir())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in model_dir().iterdir()}
    assert sum(files.values()) <= 32 * MEGABYTE
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(files)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(files)


def test_transformers_loads_a_tied_mixtral(model: Any) -> None:
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.max_position_embeddings == 1024
    assert model.generation_config.eos_token_id == [1, 6]


def test_trainer_and_transformers_compute_the_same_logits(model: Any) -> None:
    own = Model(Shape())
    own.load(model_dir())
    tokens = torch.randint(0, 4096, (2, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), model(tokens).logits, atol=1e-4, rtol=1e-4)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=200)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 4096 for token in ids)


def test_text_starts_with_bos(tokenizer: Any) -> None:
    assert tokenizer("ls")["input_ids"][0] == tokenizer.bos_token_id == 0


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is a generator?"},
        {"role": "assistant", "content": "A function."},
        {"role": "user", "content": "Why?"},
    ]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<s><|system|>Answer briefly.<|end|><|user|>What is a generator?<|end|><|assistant|>"
        "A function.<|end|><|user|>Why?<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(0) == 1
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>") == 5


def test_calls_in_a_prompt_are_read_as_an_answers_are() -> None:
    """Tools, a call and its result, by the template; and the call's text, as if the model had written it."""
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    function = {"name": "weather", "arguments": {"city": "Oslo", "note": 'a "b"\n<c> é'}}
    called = {"tool_calls": [{"id": "1", "type": "function", "function": function}]}
    turns = [
        ChatMessage("system", "Answer briefly."),
        ChatMessage("user", "Rain?"),
        ChatMessage("assistant", "I look.", json.dumps(called)),
        ChatMessage("tool", "yes", json.dumps({"tool_call_id": "1"})),
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    text = tokenizer.prompt(turns, json.dumps({"tools": tools}))
    assert text.startswith("<s><|system|>Answer briefly.\n\n")
    assert json.dumps(tools[0]["function"]) in text
    before, answer = text.split("<|assistant|>", 1)
    assert before.endswith("<|end|><|user|>Rain?<|end|>")
    answer, rest = answer.split("<|end|>", 1)
    assert rest == "<|user|><tool_response>\nyes\n</tool_response><|end|><|assistant|>"
    output = ChatOutput(read_template(model_dir()), {"weather": {}}, thinking=False)
    content, call = [*output.feed(answer), *output.finish()]
    assert content.text == "I look."
    assert call.call is not None
    assert (call.call.name, json.loads(call.call.arguments)) == ("weather", function["arguments"])


def test_demonstration_answer_ends_by_itself(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is a generator?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        full = model.generate(**prompt, max_new_tokens=160, do_sample=False)[0]
    assert full[-1] in (1, 6)
    answer = tokenizer.decode(full[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "function" in answer or "iterator" in answer


def test_card_meets_requirements(card: dict[str, Any]) -> None:
    assert set(card["heldout"]) == set(heldout())
    for kind, figures in card["heldout"].items():
        assert figures["bigram"] - figures["model"] >= 0.9, kind
    routing = card["routing"]
    assert min(min(shares) for shares in routing["shares"]) >= 0.03
    for shares in routing["shares"]:
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    # Experts specialise: kinds differ clearly in which experts they use, on the average over the layers.
    assert sum(routing["total_variation"]) / len(routing["total_variation"]) > 0.1


@pytest.mark.parametrize("kind", ["german", "python"])
def test_heldout_loss_equals_the_card(kind: str, model: Any, tokenizer: Any, card: dict[str, Any]) -> None:
    text = heldout()[kind].read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = torch.tensor(ids[: FIRST * WINDOW]).view(FIRST, WINDOW)
    with torch.no_grad():
        logits = model(rows).logits
    loss = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()))
    assert loss == pytest.approx(card["heldout"][kind]["model_first_rows"], abs=0.01)
