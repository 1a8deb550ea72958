"""The decoder of text of a config.json as transformers makes it, on the meta device: without memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

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


def run(decoder: nn.Module) -> tuple[Any, dict[str, nn.Module]]:
    """The cache after TOKENS tokens, and the experts modules that were called, by name."""
    fx_config.meta_nonzero_assume_all_nonzero = True  # of masks: any number of tokens does
    with in_one_line("run this model's decoder"), torch.inference_mode():
        ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        cache = decoder(input_ids=ids, use_cache=True).past_key_values
    used = {name: module for name, module in experts_of(decoder) if "described_k" in vars(module)}
    return cache, used
