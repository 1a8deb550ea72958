"""The contract of a device: its memory, its copies to and from the host, its slab, its fences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import sum_on_host
from protocol.messages import AttachSlab

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.arrays import FloatArray, IntArray
    from shm.formats import Bytes, MatrixFormat
    from shm.layout import StoreLayout
    from shm.mask import Mask
    from shm.store import Store
    from workers.copiers import Copier, EmulatedLink
    from workers.kernels.cuda.attention import DecodeAttention
    from workers.kernels.cuda.matrix import CudaMatrix
    from workers.kernels.cuda.sums import Weighted
    from workers.kernels.matrix import HostMatrix
    from workers.kernels.native import Library, Team

SPARE_BYTES = 500_000_000  # beside slab and KV cache, for the allocations of a step and of the libraries
LEAST_SPARE_BYTES, SPARE_SHARE = 200_000_000, 32  # of GPU memory: see spare_bytes
CONTEXT_BYTES = 600_000_000  # of GPU memory, which a second process takes for itself
SLOT_ALIGNMENT = 256  # bytes, of a slot in GPU memory: as cudaMalloc aligns, and enough for vector loads
# An output of experts, float32 [R, H]: there, or to be added up by `Device.total`.
Added: TypeAlias = "Tensor | Weighted"
Kept: TypeAlias = "Callable[[NDArray[np.void], NDArray[np.int64], IntArray, Any, Tensor], None]"
Fence = Any  # what `Device.fence` returns; None where the device computes synchronously


class SlabMemory(ABC):
    """Device memory for resident tiles: `slots` slots of `slot_bytes` bytes."""

    slot_bytes: int

    def __init__(self, all_slots: Tensor, used: int) -> None:
        """`all_slots`: uint8 [slots, used or more] on the device, not always contiguous."""
        self.slots, self.all_slots = len(all_slots), all_slots
        self._each = all_slots[:, :used].unbind()

    def slot(self, index: int) -> Tensor:
        """Return uint8 [used] on the device; the same tensor at every call."""
        return self._each[index]

    @abstractmethod
    def address(self) -> AttachSlab:
        """The description by which another process maps this slab."""

    @abstractmethod
    def copier(self, store: Store, link: EmulatedLink | None, beside: Copier | None = None) -> Copier:
        """Open what copies demanded tiles into this slab, over the emulated link if there is one. `beside`: a
        copier of the same store to another device, whose page locks serve both."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. No kernel and no copier may use it any more."""


class LayerSum(Protocol):
    """One layer's share on the device while it is computed."""

    def add(self, tiles: Sequence[tuple[int, int, Tensor]]) -> None:
        """Compute tiles: of each its item among the share's, its number within its expert, and its bytes
        in the slab, uint8. Of one item they come in their order, also from one call to the next."""

    def result(self) -> Added:
        """The sum, item after item, of the items' weights times the sums of their tiles, which all have been
        added. Called once."""


class DeviceKernel(Protocol):
    """Computes tiles in the slab."""

    def inputs(self, rows: int) -> Any:
        """Memory for so many rows of x in the form that the kernel reads, and `round`, which writes x there
        and may be part of a graph; None where `begin` takes x alone."""

    def begin(
        self, x: Any, cuts: IntArray, offsets: IntArray, rows: IntArray, weights: FloatArray
    ) -> LayerSum:
        """A share whose item i has the rows rows[offsets[i]:offsets[i + 1]] of x, float32 [R, H] or its
        rounded `inputs`, with the weights at the same places, and cuts[i] tiles, 1 or more. The result's bits
        depend on these and on the tiles alone, not on how many are added together."""


class DeviceChannelKernel(Protocol):
    """Computes with the heads and channels of a format that can leave channels out (`shm/floe.py`). A row's
    bits depend on that row and on the channels that it keeps alone, or on the device's matrix products."""

    def inputs(self, rows: int) -> Any:
        """As DeviceKernel's."""

    def activations(self, x: Tensor) -> Any:
        """The experts' input x, float32 [R, H], in the form that the others read."""

    def ups(
        self,
        heads: Tensor,
        experts: Any,
        x: Any,
        rows: Tensor,
        offsets: NDArray[np.int32],
        channels: Sequence[int],
    ) -> Tensor:
        """u of experts, as `UpByExpert.ups` says. Where there is `kept`, the experts of a single row may be
        int64 on the device."""

    def keeps(self, u: Tensor, mask: Mask) -> Tensor:
        """bool [n, channels]: `Mask.keeps` of each tile."""

    def channels(self, records: Tensor, u: Tensor, x: Any, rows: Tensor) -> Tensor:
        """The sum over channels of f(gate . x, u) * down: float32 [n, H], a new tensor. records: uint8
        [channels * channel_bytes]; u: float32 [n, channels], with its bias, 0 where a row leaves a channel
        out."""

    @property
    def kept(self) -> Kept | None:
        """Writes what x, a single row, keeps of tiles (the first argument): of each an address of its
        channels' u with biases, the first and the number of its records, and its line of the output. Then
        come the records' addresses, any in the slab; which channel of its tile each is, ascending; x; and the
        output, float32 [.., H]. None where `channels` computes a single row too."""


class Device(ABC):
    """A device: computes the backbone and holds the slab."""

    name: str
    torch_device: torch.device
    on_host: bool  # it computes on the workers' cores
    reads: int = 0  # so often this thread has waited for all that the device was given
    landing: FloatArray | None = None  # [rows, H], where the input of a layer's experts may be copied to
    flash: bool = False  # torch has flash attention of 16-bit numbers there
    process_bytes: int = 0  # of its memory, that each other process takes which uses it
    # The host's kernels and their threads, on a device that uses them.
    library: Library | None = None
    team: Team | None = None

    @abstractmethod
    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        """The kernel for this layout's tiles."""

    @abstractmethod
    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        """The kernel for a layout of a format with heads."""

    @abstractmethod
    def heads_bytes(self, layout: StoreLayout) -> int:
        """Device memory that `load_heads` takes for a layer."""

    @abstractmethod
    def load_heads(
        self, store: Store, layers: range, tick: Callable[[], None] = lambda: None
    ) -> dict[int, Tensor]:
        """The heads of each of these layers, where the device reads them: uint8 [experts, head_stride]. They
        must not be used once the store is closed. `tick` is called after each layer."""

    @abstractmethod
    def quantized_matrix(
        self, format: MatrixFormat, data: Bytes, shape: tuple[int, int]
    ) -> HostMatrix | CudaMatrix:
        """The matrix [outputs, inputs] of this shape in the format's bytes, where the device reads it."""

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        """Kernels for attention of single tokens of sequences of at most `context` tokens, whose layers cache
        `streams` (heads, width) of this dtype; None where the backbone computes it in other ways."""
        return None

    def graphs(self) -> Any:
        """Makes CUDA graphs (`CudaGraphs`); None on a device without them."""
        return None

    @abstractmethod
    def prepare(self, multiply_adds: int) -> None:
        """Set up for a step with products of at most this many multiply-adds each. The setup depends on this
        number alone, so that equal steps give equal bits."""

    def check(self, error: Exception) -> None:  # noqa: B027 - a device that computes here goes on
        """After an error in a step. Raises CudaError where the device will compute nothing any more."""

    def use(self) -> None:  # noqa: B027 - there is one
        """Make it the one that this thread's calls are for, where there are several of a kind."""

    def receive(self, tensor: Tensor, source: Device) -> Tensor:
        """A contiguous tensor of another device of the kind, on this one, which is in use: by a copy that the
        host does not wait for."""
        return tensor

    @abstractmethod
    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        """Float32 tensors [R, *] with equal R as arrays, in ONE copy; waits for their computation. The
        arrays may share the tensors' memory and are valid until those change."""

    @abstractmethod
    def from_host(self, array: NDArray[Any]) -> Tensor:
        """An array on the device, by a copy that waits for nothing. The array must not change until the next
        `to_host`."""

    def share_memory(self, memory: NDArray[np.uint8]) -> str:
        """Let kernels read this memory of the host (whole pages) in place until `unshare_memory`. Returns why
        they cannot, or ""."""
        return "the device computes in the host's memory"

    def unshare_memory(self, memory: NDArray[np.uint8]) -> None:  # noqa: B027 - nothing was shared
        """Before shared memory is unmapped. No kernel may read it any more."""

    def total(self, added: Sequence[Added], parts: Sequence[FloatArray], shape: tuple[int, ...]) -> Tensor:
        """Add up what a layer's experts give, float32 [R, H] each, in this order; the workers' partial sums,
        which are added first, come last. Tensors may be overwritten. Parts in shared memory must not change
        until the device has done what it was given."""
        tensors = cast("list[Tensor]", list(added))
        if parts:
            tensors.append(self.from_host(sum_on_host(parts, shape)))
        for other in tensors[1:]:
            tensors[0].add_(other)
        return tensors[0]

    def weighted_lines(self, lines: Tensor, chosen: IntArray, weights: FloatArray) -> Added:
        """Of each row the sum of its chosen lines of float32 [n, H] by their weights, both [R, k]."""
        of_each = np.zeros((len(chosen), len(lines)), np.float32)  # [R, n]
        np.add.at(of_each, (np.arange(len(chosen))[:, None], chosen), weights)
        return self.from_host(of_each) @ lines

    def free_cached(self) -> None:  # noqa: B027 - a device without an allocator of its own keeps nothing
        """After an allocation failed: return memory that the device's allocator keeps for later ones."""

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
        """Raise UsageError, with the numbers, unless these bytes and the spare ones fit the free memory."""

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


def spare_bytes(free: int) -> int:
    """SPARE_BYTES on a GPU with so much free memory: workspaces, kernels that are loaded late and the last
    blocks of torch's allocator take about 200 MB on any card; what fragments grows with the memory."""
    return min(SPARE_BYTES, max(LEAST_SPARE_BYTES, free // SPARE_SHARE))


def heads_of(store: Store, layer: int) -> NDArray[np.uint8]:
    """The heads of a layer in the store: [experts, head_stride], read-only."""
    layout = store.layout
    first = layout.head_offset(layer, 0)
    whole = store.all_tiles()[first : first + layout.head_stride * layout.shape.experts]
    return whole.reshape(layout.shape.experts, layout.head_stride)
