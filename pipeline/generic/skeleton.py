"""A model of transformers without its routed experts: its modules are made without memory for weights, and
then given their weights one by one, matrices in the backbone's format.

Nothing here knows a family. An experts module is one that transformers decorates with
`use_experts_implementation`; the module beside it that routes is its `gate` or `router`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pipeline.backbone.linear import DenseLinear, Precision, QuantizedLinear
from pipeline.checkpoint.decoder import MATRICES, ROUTERS, experts_of, tables_of
from pipeline.checkpoint.model_source import Tensors
from pipeline.checkpoint.reader import codes_or_numbers
from pipeline.checkpoint.tables import Parameters
from pipeline.errors import ModelError
from pipeline.generic.modules import GatheredRows, OwnEmbedding, OwnLinear
from shm.blocks import FileFormat
from shm.codes import Codes
from shm.formats import Float32, MatrixFormat
from shm.fp8 import FP8

IMPLEMENTATION = "tandem"  # of experts
LARGE = 1 << 24  # numbers of a tensor that gets no memory, not even virtual, while modules are made


def _experts(self: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """In place of the forward of every experts module."""
    return vars(self)["tandem_call"](x, index, weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


@dataclass(frozen=True)
class MoeLayer:
    """The modules of one layer with routed experts."""

    name: str  # of the experts module
    experts: nn.Module
    router: nn.Module
    owner: nn.Module  # has both

    @property
    def count(self) -> int:
        """Experts."""
        shape: torch.Size = vars(self.experts)["tandem_shape"]
        return shape[0]


class Skeleton:
    """A model's modules. `load` gives them weights."""

    def __init__(self, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
        """Raises ModelError where the family's experts cannot be computed outside it."""
        with _bare():
            # a deep copy, because the model keeps and changes its config
            self.model: PreTrainedModel = model_class._from_config(
                deepcopy(config),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation=IMPLEMENTATION,
            ).eval()
        self.model.requires_grad_(False)
        decoder = self.model.get_decoder()
        self.decoder: nn.Module = decoder
        self.layers = [_moe_layer(decoder, name, module) for name, module in experts_of(decoder)]
        if not self.layers:
            raise ModelError(f"{model_class.__name__} has no experts that can be computed outside it")

    @property
    def has_head(self) -> bool:
        return self.decoder is not self.model and self.model.get_output_embeddings() is not None

    @property
    def routers(self) -> list[nn.Module]:
        return [layer.router for layer in self.layers]

    def load(
        self,
        weights: Parameters,
        precision: Precision,
        progress: Callable[[int], None] = lambda done: None,
    ) -> int:
        """Give the decoder and the head their weights, by the parameters' names in the whole model, and move
        everything else to the device; returns the bytes of device memory. Only one matrix is in memory in
        float32 at a time. Raises ModelError where one is missing or of another shape."""
        return _Loader(self, weights, precision, progress).load()


class _Loader:
    def __init__(
        self,
        skeleton: Skeleton,
        weights: Parameters,
        precision: Precision,
        progress: Callable[[int], None],
    ) -> None:
        self._model, self._weights, self._precision = skeleton.model, weights, precision
        self._progress = progress
        self._bytes = 0
        names = {module: name for name, module in self._model.named_modules()}
        used = [skeleton.decoder]
        if skeleton.has_head and (head := self._model.get_output_embeddings()) is not None:
            used.append(head)
        self._modules = {names[m]: m for top in used for m in top.modules()}
        self._dense = {m for router in skeleton.routers for m in router.modules()}
        self._tables = tables_of(self._model)
        # expansions of latents, which are multiplied by queries too, see `attention.py`
        self._expansions = {m.kv_b_proj for m in self._modules.values() if hasattr(m, "expand_kv")}
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        self._source = dict(tied)  # of a parameter that has the weights of another one
        self._shared: dict[str, Tensor] = {}  # what such parameters share, by the name of the other one

    def load(self) -> int:
        for name, module in self._modules.items():
            if type(module) is nn.Linear and module not in self._dense:
                self._replace(name, self._linear(name, module))
            elif module in self._tables:
                self._keep_on_disk(name, module)
            elif type(module) is nn.Embedding:
                self._replace(name, OwnEmbedding(self._stored(f"{name}.weight", module.weight)))
            elif isinstance(module, nn.Embedding):
                self._keep_in_memory(name, module)
            else:
                self._fill(name, module)
            self._progress(self._bytes)
        return self._bytes

    def _linear(self, name: str, linear: nn.Linear) -> OwnLinear:
        precision, shape = self._precision, (linear.out_features, linear.in_features)
        weight = f"{name}.weight"
        matrix: QuantizedLinear | DenseLinear
        stored = weight if weight in self._weights else self._source.get(weight, weight)
        format = None if linear in self._expansions else precision.format_of([stored])
        if format is not None:
            numbers = partial(self._numbers, format, stored, linear.weight)
            made = precision.quantized_matrix(format, weight, shape, numbers)
            self._bytes += made.bytes
            matrix = QuantizedLinear(made)
        else:
            matrix = DenseLinear(self._stored(weight, linear.weight), precision.device)
        bias = None if linear.bias is None else self._kept(f"{name}.bias", linear.bias)
        return OwnLinear(matrix, shape, bias, precision.device.torch_device)

    def _keep_on_disk(self, name: str, module: nn.Module) -> None:
        table = self._weights.table(f"{name}.weight", tuple(module.get_parameter("weight").shape))
        device = self._precision.device.torch_device

        def rows(places: Tensor) -> Tensor:
            return torch.from_numpy(table.rows(places.cpu().numpy())).to(device)

        self._gather(name, module, rows)

    def _keep_in_memory(self, name: str, module: nn.Embedding) -> None:
        stored = self._stored(f"{name}.weight", module.weight)
        self._gather(name, module, lambda places: stored[places].float())

    def _gather(self, name: str, module: nn.Module, rows: Callable[[Tensor], Tensor]) -> None:
        """Let an embedding ask for its rows; what else it has is in memory."""
        module._parameters["weight"] = None
        self._fill(name, module)
        module.forward = GatheredRows(module, rows, self._precision.device.torch_device)

    def _fill(self, name: str, module: nn.Module) -> None:
        """Its own parameters and buffers, float32."""
        prefix = f"{name}." if name else ""
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                kept = self._kept(prefix + key, parameter)
                module._parameters[key] = nn.Parameter(kept, requires_grad=False)
        for key, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if prefix + key in self._weights:
                module._buffers[key] = self._kept(prefix + key, buffer)
            elif key not in module._non_persistent_buffers_set and buffer.is_floating_point():
                raise ModelError(f"the checkpoint has no tensor for {prefix + key}")
            elif buffer.is_meta:
                raise ModelError(f"{prefix + key} is larger than what a backbone keeps of its own")
            else:
                module._buffers[key] = buffer.to(self._precision.device.torch_device)

    def _numbers(self, format: MatrixFormat, name: str, like: Tensor) -> Float32 | Codes:
        """A matrix, as codes where that is its format."""
        if isinstance(format, FileFormat | FP8) and isinstance(self._weights, Tensors):
            return codes_or_numbers(self._weights.stacked([(name, tuple(like.shape))]), format)
        numbers: Float32 = self._read(name, like).numpy()
        return numbers

    def _read(self, name: str, like: Tensor) -> Tensor:
        """In float32."""
        if name not in self._weights:
            name = self._source.get(name, name)
        if name not in self._weights:
            raise ModelError(f"the checkpoint has no tensor for {name}")
        tensor = self._weights[name]
        if tensor.shape != like.shape:
            raise ModelError(f"{name} is {list(tensor.shape)} in the checkpoint, not {list(like.shape)}")
        return tensor.to(torch.float32) if like.is_floating_point() else tensor

    def _kept(self, name: str, like: Tensor) -> Tensor:
        return self._count(self._read(name, like).to(self._precision.device.torch_device).clone())

    def _stored(self, name: str, like: Tensor) -> Tensor:
        """In the backbone's dtype."""
        other = name if name in self._weights else self._source.get(name, name)
        if other in self._shared:
            return self._shared[other]
        kept = self._read(other, like).to(self._precision.device.torch_device, self._precision.dtype)
        kept = self._count(kept.contiguous())
        if other in self._source.values():
            self._shared[other] = kept
        return kept

    def _count(self, kept: Tensor) -> Tensor:
        self._bytes += kept.numel() * kept.element_size()
        return kept

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent), child, module)


def _moe_layer(decoder: nn.Module, name: str, experts: nn.Module) -> MoeLayer:
    if experts.has_post_expert_norm:
        raise ModelError(
            f"{type(experts).__name__} normalises each expert's whole output, which is no sum of tiles"
        )
    owner = decoder.get_submodule(name.rpartition(".")[0])
    for beside in ROUTERS:
        if isinstance(router := getattr(owner, beside, None), nn.Module):
            return MoeLayer(name, experts, router, owner)
    raise ModelError(f"{type(owner).__name__} has no router beside its experts")


@contextmanager
def _bare() -> Iterator[None]:
    """Within it modules are made with parameters on the meta device, experts without those of tiles, and
    buffers in memory: those are computed where a module is made."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and hasattr(type(self), "_apply_gate") and name in MATRICES:
            if name == "down_proj":
                vars(self)["tandem_shape"] = param.shape
            vars(self)[name] = torch.empty(0)  # what initialises weights may look at it
            return
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    """Within it a large tensor without numbers has no memory: it becomes a parameter."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            sizes = args[0] if args and not isinstance(args[0], int) else args
            if torch.Size(sizes).numel() >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
