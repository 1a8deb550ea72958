"""The decoder of a config.json as transformers makes it, and its facts: made on the meta device, without
memory for weights, and run once on a few tokens without arithmetic.

As a process of its own, started by `pipeline/models/facts.py`: reads {"config": ..., "headers": ...} as JSON
from its standard input and writes facts, or {"error": one line}. `headers`, where they are given, are those
of a checkpoint, by tensor: they are checked against the model.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.checkpoint.converted import check_headers
from pipeline.checkpoint.decoder import (
    MATRICES,
    RESERVED,
    ROUTERS,
    TOKENS,
    decoder_of,
    experts_of,
    found_math,
    run,
    tables_of,
    without_memory,
)
from pipeline.errors import ModelError
from pipeline.generic.caches import check_layers, kept_by
from pipeline.models.config_keys import Config, shown
from pipeline.models.facts import WHOLE_PROMPTS, Group, ModelFacts, Table, pack
from shm.expert_math import ExpertMath
from workers.lifetime import limit_memory

MEMORY = 4 << 30  # bytes that the process may allocate: a config can describe any number of modules
DEFAULT_POSITIONS = 1 << 17  # of a model whose config gives no limit


def describe(model: PreTrainedModel) -> ModelFacts:
    """The facts of a model on the meta device. Raises ModelError where it cannot be run."""
    decoder = model.get_decoder()
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    _check_hooks(model, decoder)
    if text.vocab_size <= RESERVED:
        raise ModelError(f"config.json: a vocabulary of {text.vocab_size} tokens makes no sense")
    cache, used = run(decoder)
    check_layers(cache, model.config.model_type)
    kept = kept_by(cache, TOKENS, decoder)
    kinds = {_kind(module) for module in used.values()}
    if len(kinds) > 1:
        raise ModelError("config.json: the layers' experts differ in number or size, which is not supported")
    ((experts, hidden, intermediate, top_k, math),) = kinds
    numbers = [int(found[1]) for name in used if (found := re.search(r"\.(\d+)\.", name))]
    layers = getattr(text, "num_hidden_layers", None) or len(kept)
    return ModelFacts(
        layers=layers,
        moe_layers=tuple(numbers if len({*numbers}) == len(used) else range(len(used))),
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        math=math,
        vocabulary=text.vocab_size,
        max_positions=_positions(text),
        tied_embeddings=head is not None and head.weight is decoder.get_input_embeddings().weight,
        kv_streams=tuple(layer.streams for layer in kept),
        state_shapes=tuple(layer.states for layer in kept),
        backbone=tuple(_groups(model, decoder)),
        tables=tuple(Table(name, tuple(m.weight.shape)) for m, name in tables_of(model).items()),
        latent=any(hasattr(module, "kv_b_proj") for module in decoder.modules()),
        whole_prompts=model.config.model_type in WHOLE_PROMPTS,
        left_aside=_left_aside(model),
    )


def _positions(text: PreTrainedConfig) -> int:
    """The positions that a model has, of one with frequencies for short and for long texts those of short
    ones: keys that are cached for one kind are wrong in the other."""
    positions = getattr(text, "max_position_embeddings", None) or DEFAULT_POSITIONS
    if not isinstance(positions, int) or positions < 1:
        raise ModelError(f"config.json: {shown(positions)} positions make no sense")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":
            positions = min(positions, rope["original_max_position_embeddings"])
    return positions


def _check_hooks(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raises ModelError for a model without experts that can be computed outside it."""
    if next(experts_of(decoder), None) is not None:
        return
    kind = model.config.model_type
    named = (type(m).__name__ for m in decoder.modules())
    own = next((name for name in named if re.search("Expert|MoE|MoeBlock", name)), None)
    if own is not None:
        raise ModelError(
            f"config.json: {kind} computes its experts itself ({own}), out of reach of transformers'"
            " `use_experts_implementation`: it cannot be run, use a model of another family"
        )
    raise ModelError(f"config.json: {kind} has no routed experts; Tandem is for mixture-of-experts models")


def _kind(module: Any) -> tuple[int, int, int, int, ExpertMath]:
    """Experts, H, I, k, and what each computes."""
    experts, *matrix = module.down_proj.shape
    hidden, intermediate = reversed(matrix) if module.is_transposed else matrix
    return experts, hidden, intermediate, vars(module)["described_k"], found_math(module)


def _groups(model: PreTrainedModel, decoder: nn.Module) -> Iterator[Group]:
    """The weights that the generic backbone keeps, by kind, as it keeps them (`skeleton.py`)."""
    tops = [decoder, model.get_output_embeddings()]
    counts: Counter[tuple[Any, tuple[int, ...]]] = Counter()
    dense = {
        m for name, module in decoder.named_modules() if name.endswith(ROUTERS) for m in module.modules()
    }
    dense |= {m.kv_b_proj for m in decoder.modules() if hasattr(m, "expand_kv")}
    seen = {table.weight for table in tables_of(model)}  # and what is tied is one
    for module in {m: None for top in tops if top is not None for m in top.modules()}:
        stripped = MATRICES if hasattr(type(module), "_apply_gate") else ()
        for name, parameter in module.named_parameters(recurse=False):
            whole = type(module) is nn.Linear and module not in dense and name == "weight"
            table = isinstance(module, nn.Embedding) and name == "weight"
            kind = "matrix" if whole else "dense" if table else "float32"
            if name not in stripped and parameter not in seen:
                counts[kind, tuple(parameter.shape)] += 1
            seen.add(parameter)
    return (Group(kind, shape, count) for (kind, shape), count in counts.items())


def _left_aside(model: PreTrainedModel) -> str:
    parts = [name.removesuffix("_config") for name in model.config.sub_configs if name != "text_config"]
    parts = [part for part in parts if getattr(model.config, f"{part}_config", None) is not None]
    return (
        f"the {' and '.join(parts)} parts of this model are left aside: it reads and writes text"
        if parts
        else ""
    )


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    limit_memory(MEMORY)
    torch.set_num_threads(1)
    question = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        answer = pack(_answer(question["config"], question.get("headers")))
    except ModelError as e:
        answer = msgspec.json.encode({"error": str(e)})
    with os.fdopen(answers, "wb") as out:
        out.write(answer)


def _answer(config: Config, headers: dict[str, Any] | None) -> ModelFacts:
    model = without_memory(*decoder_of(config))
    facts = describe(model)
    if headers is None:
        return facts
    headers = {name: (dtype, tuple(shape)) for name, (dtype, shape) in headers.items()}
    return replace(facts, left_aside=check_headers(model, headers))


if __name__ == "__main__":
    main()
