"""The decoder of a config.json as transformers makes it, and its facts: made on the meta device, without
memory for weights, and run once on a few tokens without arithmetic.

As a process of its own, started by `pipeline/models/facts.py`: reads {"config": ..., "headers": ...} as JSON
from its standard input and writes facts, or {"error": one line}. `headers`, where they are given, are those
of a checkpoint, by tensor: they are checked against the model.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto import modeling_auto

from pipeline.errors import ModelError
from pipeline.generic.caches import LayerKept, kept_by
from pipeline.generic.found_math import found_math
from pipeline.generic.skeleton import MATRICES, ROUTERS, experts_of
from pipeline.models.config_keys import MAX_COUNT, Config, shown
from pipeline.models.facts import Group, ModelFacts, pack
from shm.expert_math import ExpertMath

IMPLEMENTATION = "described"
TOKENS = 7  # of the forward: fewer than any window, and another number than heads or widths
MEMORY = 24 << 30  # bytes of addresses that the process may use: a config can describe any number of modules
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
DEFAULT_POSITIONS = 1 << 17  # of a model whose config gives no limit


def _called(self: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """In place of the forward of every experts module."""
    vars(self)["described_k"] = index.shape[-1]
    return torch.zeros_like(x)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _called)


def decoder_of(config: Config) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of the model whose decoder and head are run, and its config. Of a model of text and images it
    is the whole one where transformers has no other. Raises ModelError."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"config.json: model_type {shown(kind)} is unknown to transformers {transformers.__version__};"
            " a newer one may know it: pip install -U transformers"
        )
    with _in_one_line("read this config"):
        made = CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(deepcopy(dict(config))))
    parts = [getattr(made, name, None) for name in made.sub_configs]
    # A model that also speaks has the one that reads and writes as a part.
    candidates = [part for part in parts if part is not None and "text_config" in part.sub_configs]
    for candidate in (*candidates, made):
        for mapping in MAPPINGS:
            model = mapping.get(type(candidate), None)
            if model is not None and issubclass(model, GenerationMixin):
                text = candidate.get_text_config(decoder=True)
                chosen = text if model.config_class is type(text) else candidate
                if config.get("quantization_config") is not None:
                    chosen.quantization_config = config["quantization_config"]
                return model, chosen
    model = _by_name(type(made))
    if model is None or made.is_encoder_decoder:
        raise ModelError(
            f"config.json: {kind} is no decoder of text that generates token by token, so it cannot be run"
        )
    return model, made


def _by_name(config: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The model with a head beside this config, of a family that the automatic classes do not list alone."""
    modeling = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    if modeling is None:
        modeling = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    models: list[type[PreTrainedModel]] = [
        made
        for made in vars(modeling).values()
        if isinstance(made, type) and issubclass(made, PreTrainedModel) and issubclass(made, GenerationMixin)
    ]
    fitting = (made for made in models if made.config_class is config)
    return next((made for made in fitting if made.__name__.endswith("ForCausalLM")), None)


def without_memory(model: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device, in float32. Raises ModelError where transformers cannot make it."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_COUNT:
        raise ModelError(f"config.json: {layers} layers make no sense (at most {MAX_COUNT})")
    with _in_one_line("make this model"), torch.device("meta"):
        made: PreTrainedModel = model._from_config(
            deepcopy(config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=IMPLEMENTATION,
        )
    return made.eval()


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turn whatever transformers raises into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as e:
        lines = [line.strip() for line in str(e).splitlines() if line.strip()]
        reason = f"{type(e).__name__}: {lines[-1] if lines else ''}"[:300]
        raise ModelError(
            f"config.json: transformers {transformers.__version__} cannot {what}: {reason}"
        ) from None


def describe(model: PreTrainedModel) -> ModelFacts:
    """The facts of a model on the meta device. Raises ModelError where it cannot be run."""
    decoder = model.get_decoder()
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    _check_hooks(model, decoder)
    kept, used = _run(decoder)
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
        max_positions=getattr(text, "max_position_embeddings", None) or DEFAULT_POSITIONS,
        tied_embeddings=head is not None and head.weight is decoder.get_input_embeddings().weight,
        kv_streams=tuple(layer.streams for layer in kept),
        state_shapes=tuple(layer.states for layer in kept),
        backbone=tuple(_groups(model, decoder)),
        latent=any(hasattr(module, "kv_b_proj") for module in decoder.modules()),
        left_aside=_left_aside(model),
    )


def experts_used(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The experts modules that text goes through, by their names in the whole model, in the order of the
    layers."""
    _, used = _run(model.get_decoder())
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: module for module in used.values()}


def _run(decoder: nn.Module) -> tuple[list[LayerKept], dict[str, nn.Module]]:
    """What each layer of the cache keeps, and the experts modules that were called."""
    fx_config.meta_nonzero_assume_all_nonzero = True  # of masks: any number of tokens does
    with _in_one_line("run this model's decoder"), torch.inference_mode():
        ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        cache = decoder(input_ids=ids, use_cache=True).past_key_values
    used = {name: module for name, module in experts_of(decoder) if "described_k" in vars(module)}
    return kept_by(cache, TOKENS), used


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
    seen: set[nn.Parameter] = set()  # tied ones are one
    for module in {m: None for top in tops if top is not None for m in top.modules()}:
        stripped = MATRICES if hasattr(type(module), "_apply_gate") else ()
        for name, parameter in module.named_parameters(recurse=False):
            whole = type(module) is nn.Linear and module not in dense and name == "weight"
            kind = "matrix" if whole else "dense" if type(module) is nn.Embedding else "float32"
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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
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
    from pipeline.checkpoint.converted import check_headers  # which imports this module

    headers = {name: (dtype, tuple(shape)) for name, (dtype, shape) in headers.items()}
    return replace(facts, left_aside=check_headers(model, headers))


if __name__ == "__main__":
    main()
