"""Random parameters of a model of any family outside its routed experts, by their names in transformers.

Matrices are drawn as `random_model.py` draws tensors. Everything small has the values that transformers gives
a new model: norms, biases, decays of recurrent layers and the like mean something by their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.checkpoint.decoder import MATRICES, decoder_of, experts_of, without_memory
from pipeline.checkpoint.random_tensors import RandomTensors
from pipeline.checkpoint.tables import Parameters, Places, Shape
from pipeline.models.config_keys import Config
from shm.layout import Float32

TABLE_ROWS = 4096  # of a table, at most, that are drawn
SMALL = 1 << 20  # numbers, at most, of a parameter that is no layer's `weight` and is left to transformers


class RandomParameters(RandomTensors, Parameters):
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
        bits = self.stacked([(name, self._drawn[name])]).bits
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

    def table(self, name: str, shape: Shape) -> RandomTable:
        """Implements `Parameters.table`."""
        return RandomTable(self.float32(name, (min(shape[0], TABLE_ROWS), *shape[1:])))

    def __iter__(self) -> Iterator[str]:
        yield from self._small
        yield from self._drawn

    def __len__(self) -> int:
        return len(self._small) + len(self._drawn)


class RandomTable:
    """A table of as many rows as one likes, copies of a few."""

    def __init__(self, numbers: Float32) -> None:
        self._numbers = numbers

    def rows(self, places: Places) -> Float32:
        """Implements `Table.rows`."""
        found: Float32 = self._numbers[places % len(self._numbers)]
        return found


def _small(model: PreTrainedModel) -> dict[str, Tensor]:
    """The values of small parameters and stored buffers, by name. They are made in the model, which is on the
    meta device."""
    made: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        for name, parameter in list(module.named_parameters(recurse=False)):
            if _is_small(module, name, parameter):
                made[before + name] = torch.full(parameter.shape, torch.nan)
                module._parameters[name] = nn.Parameter(made[before + name], requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                empty = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = made[before + name] = torch.full_like(buffer, empty, device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.initialize_weights()
    for name, tensor in made.items():
        if tensor.is_floating_point():  # those without a rule of their family
            torch.nan_to_num_(tensor, 0.0 if name.endswith("bias") else 1.0)
        elif tensor.dim() == 2 and not tensor.any():
            tensor[:] = _any_experts(model, tensor)
    return made


def _is_small(module: nn.Module, name: str, parameter: Tensor) -> bool:
    if hasattr(type(module), "_apply_gate") and name in MATRICES:
        return False
    return parameter.dim() < 2 or (name != "weight" and parameter.numel() <= SMALL)


def _any_experts(model: PreTrainedModel, like: Tensor) -> Tensor:
    """A table [V, k] of the experts that a token has whatever its hidden state, different ones in a row."""
    modules: list[Any] = [module for _, module in experts_of(model)]
    experts = min(len(module.down_proj) for module in modules)
    tokens, places = (torch.arange(size) for size in like.shape)
    return (tokens[:, None] + places) % experts
