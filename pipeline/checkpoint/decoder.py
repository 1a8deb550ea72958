"""The decoder of text of a config.json as transformers makes it, on the meta device: without memory."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto import modeling_auto

from pipeline.errors import ModelError
from pipeline.models.config_keys import MAX_COUNT, Config, for_transformers, shown
from pipeline.models.registry import ARCHITECTURES
from pipeline.models.transformers_log import to_own_log
from shm.expert_math import GELU_ALPHA, GELU_CUBIC, ExpertMath, Glu, Relu2

ROUTERS = ("gate", "router")  # names of a router, beside its experts
MATRICES = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias")  # those of tiles
IMPLEMENTATION = "described"
TOKENS = 7  # of the forward: fewer than any window, and another number than heads or widths
RESERVED = 3  # tokens of a vocabulary that a trial does not take
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)


def _called(self: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """In place of the forward of every experts module."""
    vars(self)["described_k"] = index.shape[-1]
    return torch.zeros_like(x)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _called)


def decoder_of(config: Config) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of the model whose decoder and head are run, and its config. Of a model of text and images it
    is the whole one where transformers has no other. Raises ModelError."""
    to_own_log()
    kind = config.get("model_type")
    if kind in ARCHITECTURES:
        kind = ARCHITECTURES[kind].known_as or kind
        config = {**config, "model_type": kind}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"config.json: model_type {shown(kind)} is unknown to transformers {transformers.__version__};"
            " a newer one may know it: pip install -U transformers"
        )
    own = for_transformers(config)
    with in_one_line("read this config"):
        made = CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(own))
    parts = [getattr(made, name, None) for name in made.sub_configs]
    # A model that also speaks has the one that reads and writes as a part.
    candidates = [part for part in parts if part is not None and "text_config" in part.sub_configs]
    for candidate in (*candidates, made):
        for mapping in MAPPINGS:
            model = mapping.get(type(candidate), None)
            if model is not None and issubclass(model, GenerationMixin):
                text = candidate.get_text_config(decoder=True)
                chosen = text if model.config_class is type(text) else candidate
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
    with in_one_line("make this model"), torch.device("meta"):
        made: PreTrainedModel = model._from_config(
            deepcopy(config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=IMPLEMENTATION,
        )
    return made.eval()


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
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


def experts_used(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The experts modules that text goes through, by their names in the whole model, in the order of the
    layers."""
    _, used = run(model.get_decoder())
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: module for module in used.values()}


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of experts, with their names, in the order of the layers."""
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "has_post_expert_norm"):
            yield name, module


def tables_of(model: PreTrainedModel) -> dict[nn.Embedding, str]:
    """Returns the decoder's embeddings other than the input's, with their names in the whole model. An
    embedding with tied weights is left out."""
    decoder = model.get_decoder()
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied.keys(), *tied.values()}
    names = {module: name for name, module in model.named_modules()}
    embeddings = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    beside = [module for module in embeddings if module is not decoder.get_input_embeddings()]
    return {module: names[module] for module in beside if f"{names[module]}.weight" not in shared}


def run(decoder: nn.Module) -> tuple[Any, dict[str, nn.Module]]:
    """The cache after TOKENS tokens, and the experts modules that were called, by name."""
    fx_config.meta_nonzero_assume_all_nonzero = True  # of masks: any number of tokens does
    with in_one_line("run this model's decoder"), torch.inference_mode():
        ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        cache = decoder(input_ids=ids, use_cache=True).past_key_values
    used = {name: module for name, module in experts_of(decoder) if "described_k" in vars(module)}
    return cache, used


# ----------------------------------------------------------------------------------------------------------
# What an experts module of transformers computes, found by evaluating it: activations have many names and
# few formulas.


SHAPES = ((1.0, 0.0), (GELU_ALPHA, GELU_CUBIC), (1.702, 0.0))  # alpha and cubic: SiLU, GELU, quick GELU
MOST = 40.0  # of gate and up where a formula is compared
CLOSE = 1e-4  # relative and absolute


def found_math(experts: nn.Module) -> ExpertMath:
    """The kind of a module that `use_experts_implementation` decorates; its parameters are not read. Raises
    ModelError where no kind that we know computes the same."""
    module: Any = experts
    if module.has_post_expert_norm:
        raise ModelError(
            f"config.json: each expert's output is normalised ({type(experts).__name__}), which is no sum"
            " over an expert's tiles: models of this family cannot be run, use another one"
        )
    activation = _gated(module) if module.has_gate else _ungated(module)
    return ExpertMath(activation, bool(module.has_bias))


def matrices_of(module: Any, parts: Mapping[str, Tensor]) -> list[Tensor]:
    """An expert's gate [I, H], unless ungated, up [I, H] and down [H, I], then the biases [1, I] of gate and
    up, from its parts of the module's parameters."""
    wide, down = parts["gate_up_proj" if module.has_gate else "up_proj"], parts["down_proj"]
    if module.is_transposed:
        wide, down = wide.T, down.T
    matrices = [*_halves(module, wide), down]
    if module.has_bias:
        biases = parts["gate_up_proj_bias" if module.has_gate else "up_proj_bias"]
        matrices += [half[None] for half in _halves(module, biases)]
    return matrices


def _halves(module: Any, both: Tensor) -> tuple[Tensor, ...]:
    """Gate and up of a stacked matrix or bias, along its first axis; up alone without a gate."""
    if not module.has_gate:
        return (both,)
    if module.is_concatenated:
        return both[: len(both) // 2], both[len(both) // 2 :]
    return both[::2], both[1::2]


def _gated(experts: Any) -> Glu:
    """The numbers of f are among the module's and the config's own, whatever their combination."""
    gates, ups = (torch.linspace(-MOST, MOST, count) for count in (161, 81))
    g, u = (side.reshape(1, -1) for side in torch.meshgrid(gates, ups, indexing="ij"))
    both = torch.cat([g, u], -1) if experts.is_concatenated else torch.stack([g, u], -1).flatten(-2)
    with torch.no_grad():
        wanted = experts._apply_gate(both.clone())
    for glu in _candidates(experts):
        if _same(glu(g.numpy(), u.numpy()), wanted):
            return glu
    raise _unknown(experts)


def _candidates(experts: Any) -> Iterator[Glu]:
    limits = dict.fromkeys([math.inf, *_numbers(experts, "limit")])
    softcaps = dict.fromkeys([0.0, *_numbers(experts, "softcap")])
    shapes = [*SHAPES, *((alpha, 0.0) for alpha in _numbers(experts, "alpha"))]
    for (alpha, cubic), limit, offset in itertools.product(shapes, limits, (0.0, 1.0)):
        for gate_softcap, up_softcap in itertools.product(softcaps, repeat=2):
            yield Glu(alpha, cubic, limit, limit, offset, gate_softcap, up_softcap)


def _ungated(experts: Any) -> Relu2:
    u = torch.linspace(-MOST, MOST, 161)
    with torch.no_grad():
        if _same(Relu2()(u.numpy()), experts.act_fn(u)):
            return Relu2()
    raise _unknown(experts)


def _same(found: np.ndarray[Any, Any], wanted: Tensor) -> bool:
    return bool(np.allclose(found, wanted.numpy(), rtol=CLOSE, atol=CLOSE))


def _numbers(experts: Any, word: str) -> list[float]:
    """Positive numbers of the module and of its config whose names have this word."""
    config = experts.config.to_dict() if hasattr(experts, "config") else {}
    named = {**config, **vars(experts)}
    return [float(v) for k, v in named.items() if word in k and type(v) in (int, float) and 0 < v < math.inf]


def _unknown(experts: nn.Module) -> ModelError:
    return ModelError(
        f"config.json: no kind of experts that is known computes what {type(experts).__name__} does (SwiGLU"
        " and its like, relu^2): models of this family cannot be run, use another one"
    )
