"""The contract of a device: its memory, its copies to and from the host, its slab, its fences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.messages import AttachSlab
from workers.kernels.choice import DEFAULT, Choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shm.layout import StoreLayout
    from shm.store import Store
    from workers.copiers import Copier
    from workers.kernels.native import Library, Team

SPARE_BYTES = 500_000_000  # beside slab and KV cache, for the allocations of a step and of the libraries
SLOT_ALIGNMENT = 256  # bytes, of a slot in GPU memory: as cudaMalloc aligns, and enough for vector loads
Fence = Any  # what `Device.fence` returns; None where the device computes synchronously


class SlabMemory(ABC):
    """Device memory for resident tiles: `slots` slots of `slot_bytes` bytes."""

    slots: int
    slot_bytes: int

    @abstractmethod
    def slot(self, index: int) -> Tensor:
        """uint8 [slot_bytes] on the device; the same memory at every call."""

    @abstractmethod
    def address(self) -> AttachSlab:
        """The description by which another process maps this slab."""

    @abstractmethod
    def local_copier(self, store: Store) -> Copier:
        """A copier into this slab for a thread of this process."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. No kernel and no copier may use it any more."""


class DeviceKernel(Protocol):
    """Computes tiles in the slab."""

    def activations(self, x: Tensor) -> Any:
        """The experts' input x, float32 [R, H], in the form that `compute` reads; once per layer."""

    def compute(self, tiles: Tensor, x: Any, rows: Tensor) -> Tensor:
        """The sum of the outputs of consecutive tiles (uint8 [number * tile_bytes]) for the rows x[rows]
        (int64 [n]): float32 [n, H], a new tensor."""


class Device(ABC):
    """Where the backbone is computed."""

    name: str
    torch_device: torch.device
    on_host: bool  # it computes on the workers' cores
    # The host's kernels and their threads, on a device that uses them and where they were compiled.
    kernels: Choice = DEFAULT  # of matrices that the host computes
    library: Library | None = None
    team: Team | None = None

    @abstractmethod
    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        """The kernel for this layout's tiles."""

    @abstractmethod
    def check_quantized(self) -> None:
        """Raise UsageError unless a quantized backbone can be computed here."""

    @abstractmethod
    def prepare(self, multiply_adds: int) -> None:
        """Set up for a step with products of at most this many multiply-adds each. The setup depends on this
        number alone, so that equal steps give equal bits."""

    @abstractmethod
    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        """Float32 tensors [R, *] with equal R as arrays, in ONE copy; waits for their computation. The
        arrays may share the tensors' memory and are valid until those change."""

    @abstractmethod
    def from_host(self, array: NDArray[np.float32]) -> Tensor:
        """A float32 array on the device. The array must not change until the next `to_host`."""

    @abstractmethod
    def fence(self) -> Fence:
        """A mark behind all work that was started so far."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Return when all work before the mark has completed."""

    @abstractmethod
    def time_mark(self) -> Any:
        """The moment at which the work that was started so far has been computed."""

    @abstractmethod
    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Seconds between two such moments; 0 where the later one is still to come."""

    @abstractmethod
    def check_memory(self, slab: int, kv: int, weights: int) -> None:
        """Raise UsageError, with the numbers, unless these bytes and SPARE_BYTES fit the free memory."""

    @abstractmethod
    def open_slab(
        self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> SlabMemory:
        """Allocate a slab. `name` is used where the slab is a named segment, whose pages may take a while:
        `tick` is called meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """End the device's threads. It must not be used any more."""

    @abstractmethod
    def describe(self) -> str:
        """One line for a person."""
