"""What a model is to everybody who loads one: a config, tensors by name, and experts for a store.

`source.py` has those of a checkpoint's folder, `random_model.py` those of a shape with random weights, and
`open.py` finds out which of them is meant. Nobody else
knows the difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from pipeline.checkpoint.reader import RawTensor, TensorReader
from pipeline.models.config_keys import Config
from shm.layout import Float32
from shm.store import StoreBuilder


class Tensors(Protocol):
    """A model's tensors, for any number of threads."""

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """A tensor's numbers in this shape; the array is the caller's own. Raises ModelError where the model
        has no such tensor."""

    def stacked(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor:
        """Tensors (name, shape) with rows of one length, each below the one before it, in their own bits
        where those are of one kind; the memory is the caller's own. Raises ModelError."""

    def again(self) -> TensorReader | None:
        """A reader of the same tensors that stays open when this one is closed; None where they lie in no
        file."""


class ModelSource(ABC):
    """One model that can be loaded."""

    name: str  # for a person: the folder, or shape:NAME/LAYERS
    config: Config
    kind: str  # where its weights come from
    filling: str  # what is done while its store is filled
    fused: bool  # the layout of its tensors, see architecture.py

    @abstractmethod
    def fingerprint(self, format_name: str, tile: int) -> str:
        """64 hex digits that change whenever the bytes of the store would, in this format and with tiles of
        so many channels. No weight is read."""

    @abstractmethod
    def worth_keeping(self, format_name: str) -> bool:
        """Whether reading its store of this format from the disk is quicker than filling it again."""

    @abstractmethod
    def tensors(self) -> AbstractContextManager[Tensors]:
        """Its tensors outside the routed experts."""

    @abstractmethod
    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        """Write every routed expert into a new store, on all cores, and return how many bytes of weights were
        read for it. `progress` is given the store's bytes written so far, in this thread. Raises ModelError,
        and whatever `progress` raises."""
