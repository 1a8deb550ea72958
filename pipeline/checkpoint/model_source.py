"""The interface of a model that can be loaded: a checkpoint folder (`open.py`) or a shape with
random weights (`random_model.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from pipeline.checkpoint.reader import RawTensor
from pipeline.models.config_keys import Config
from shm.codes import Codes
from shm.layout import Float32
from shm.store import StoreBuilder


@runtime_checkable
class Tensors(Protocol):
    """A model's tensors outside the routed experts, for any number of threads."""

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """A tensor's numbers, owned by the caller. Raises ModelError: it is missing or of another shape."""

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        """Tensors (name, shape) with rows of one length, stacked by rows, with unchanged bits where all have
        one dtype, or codes where all have those of one format; the caller owns the memory. Raises ModelError
        as `float32`."""


class OwnMatrix(NamedTuple):
    """A matrix that a file has quantized."""

    format: str  # the block format that keeps it: without loss, or int8
    shape: tuple[int, int]  # outputs, inputs


class ModelSource(ABC):
    """A model that can be loaded."""

    name: str  # the folder, or shape:NAME/LAYERS
    config: Config
    kind: str  # the origin of its weights, for log lines
    filling: str  # the stage name of `fill`, for progress displays
    note: str = ""  # a line for the user: parts of the model that are left aside, tensors that are not read
    quantized: str = (
        ""  # how the file has the experts, for the user, as "Q4_K"; empty: they are plain numbers
    )
    own_format: str | None = None  # the native format that keeps its experts' codes without loss
    # The matrices beside the routed experts that the file has quantized, by their names in `tensors`.
    own_matrices: Mapping[str, OwnMatrix] = MappingProxyType({})
    # How the files have the matrices beside the routed experts that are neither BF16 nor F32, by their names.
    kinds: Mapping[str, str] = MappingProxyType({})
    half: bool = False  # some experts are in F16
    fused: bool  # the layout of its tensors, see `pipeline/models/architecture.py`

    @abstractmethod
    def fingerprint(self, format_name: str, tile: int) -> str:
        """64 hex digits that change whenever the store's bytes would. `tile`: channels. Reads no weights."""

    @abstractmethod
    def worth_keeping(self, format_name: str) -> bool:
        """Returns whether reading its store of this format from disk is faster than filling it again: not of
        its own format, which only takes laying the same bytes out."""

    @abstractmethod
    def tensors(self) -> AbstractContextManager[Tensors]:
        """Open its tensors outside the routed experts."""

    @abstractmethod
    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        """Write every routed expert into a new store, on all cores; returns the bytes of weights read.
        `progress` is called in this thread with the store's bytes written so far. Raises ModelError, and the
        exceptions of `progress`."""
