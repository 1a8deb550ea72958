"""Random parameters of a model of any family outside its routed experts, by their names in transformers.

Matrices are drawn as `random_model.py` draws tensors. Everything small has the values that transformers gives
a new model: norms, biases, decays of recurrent layers and the like mean something by their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.backbone.weights import tensor_of
from pipeline.checkpoint.random_model import RandomTensors
from pipeline.generic.describe import decoder_of, without_memory
from pipeline.generic.skeleton import MATRICES, experts_of
from pipeline.models.config_keys import Config

SMALL = 1 << 20  # numbers, at most, of a parameter that is no layer's `weight` and is left to transformers


class RandomParameters(RandomTensors, Mapping[str, Tensor]):
    """The parameters and stored buffers, for any number of threads: those that are drawn on each call, in
    bfloat16, and small ones in float32. Tied parameters are given once."""

    def __init__(self, config: Config, shape: str, pool: ThreadPoolExecutor) -> None:
        """Raises ModelError for a model that transformers cannot make."""
        super().__init__(shape, pool)
        model = without_memory(*decoder_of(config))
        self._small = _small(model)
        routed = {f"{name}.{matrix}" for name, _ in experts_of(model) for matrix in MATRICES}
        left_out = routed | {*(getattr(model, "all_tied_weights_keys", None) or {})}
        self._drawn = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point() and name not in self._small and name not in left_out
        }

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        return tensor_of(self.stacked([(name, self._drawn[name])]))

    def __iter__(self) -> Iterator[str]:
        yield from self._small
        yield from self._drawn

    def __len__(self) -> int:
        return len(self._small) + len(self._drawn)


def _small(model: PreTrainedModel) -> dict[str, Tensor]:
    """The values of small parameters and stored buffers, by name. They are made in the model, which is on the
    meta device."""
    made: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if _is_small(module, name, parameter):
                empty = torch.full(parameter.shape, torch.nan)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
                made[f"{prefix}.{name}" if prefix else name] = module._parameters[name]  # type: ignore[assignment]
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                value = _new_buffer(model, buffer)
                module._buffers[name] = made[f"{prefix}.{name}" if prefix else name] = value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.initialize_weights()
    for name, tensor in made.items():
        if tensor.is_floating_point():  # those without a rule of their family
            torch.nan_to_num_(tensor.data, 0.0 if name.endswith("bias") else 1.0)
    return {name: tensor.data for name, tensor in made.items()}


def _is_small(module: nn.Module, name: str, parameter: Tensor) -> bool:
    if hasattr(type(module), "_apply_gate") and name in MATRICES:
        return False
    return parameter.dim() < 2 or (name != "weight" and parameter.numel() <= SMALL)


def _new_buffer(model: PreTrainedModel, like: Tensor) -> Tensor:
    """Whole numbers of two axes are a table of each token's experts."""
    if like.is_floating_point():
        return torch.full(like.shape, torch.nan)
    text: Any = model.config.get_text_config(decoder=True)
    if like.dim() == 2 and len(like) == text.vocab_size:
        rows, columns = (torch.arange(size) for size in like.shape)
        experts = next(len(module.down_proj) for _, module in experts_of(model))
        return ((rows[:, None] + columns) % experts).to(like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype)
