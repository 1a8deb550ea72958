"""The C kernels: their variants, and their functions for numpy arrays.

`c/kernels.h` specifies what a library exports and computes. Each variant is a library of its own, compiled at
installation if the compiler supports its instructions; the first one that the processor has computes, in all
processes. The functions release the GIL.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.control import ControlLine
from shm.descriptor import Descriptor, address_of
from shm.errors import NotCompiled
from shm.formats import LINE, Bytes, Float32
from shm.layout import StoreLayout
from shm.mask import NOTHING, Tally
from shm.store import Store
from workers.kernels.c_types import (
    BF16_BITS,
    POINTER,
    SIZE,
    SMALL_BUFFERS,
    Activations,
    Codes,
    Geometry,
    Host,
    Kept,
    Quantized,
    TallyNumbers,
    check_weights,
    checked,
    typed,
)

VARIANTS = {  # best first
    "amx": "AMX",
    "avx512": "AVX-512 VNNI",
    "avx2": "AVX2",
    "portable": "portable C",
}
VERSION = 23  # of the functions in c/kernels.h
OTHER_VERSION = "compiled from another version: install again"

log = logging.getLogger(__name__)


class Library:
    """One variant's functions. Python checks shapes and types, because C sees only pointers; C checks the
    numbers in arrays that say what is read and written."""

    def __init__(self, variant: str, functions: ctypes.CDLL) -> None:
        """Use `load`."""
        self.variant = variant
        self.functions = functions
        self._quantize = typed(functions.tandem_quantize, POINTER, POINTER, SIZE, POINTER, POINTER)
        self.scratch = typed(functions.tandem_scratch, POINTER, SIZE, result=SIZE)
        tiles = (*[POINTER] * 3, SIZE, POINTER, SIZE, POINTER, SIZE, *[POINTER] * 2)
        self._tiles = typed(functions.tandem_tiles, *tiles, result=checked)
        works = (functions.tandem_work, functions.tandem_guarded_work)
        self._work, self._guarded_work = (
            typed(function, *[POINTER] * 2, *[SIZE, POINTER] * 3, result=ctypes.c_int) for function in works
        )
        self._read = typed(functions.tandem_read, POINTER, POINTER, SIZE, result=ctypes.c_uint64)
        self._start_team = typed(functions.tandem_team_create, SIZE, result=POINTER)
        self._linger = typed(functions.tandem_team_linger, POINTER, SIZE)
        self._end_team = typed(functions.tandem_team_destroy, POINTER)

    def kernel(self, geometry: Geometry, team: Team | None = None) -> Kernel:
        return Kernel(self, geometry, team)

    def read(self, memory: Bytes, team: Team | None = None) -> int:
        """Read all of `memory`, contiguous and a multiple of 64 bytes, and return its sum as 64-bit numbers:
        the time it takes is the limit of everything that reads weights."""
        if not memory.flags.c_contiguous or memory.nbytes % LINE:
            raise ValueError(f"{memory.nbytes} bytes are no whole lines of {LINE}")
        total: int = self._read(handle_of(team), memory.ctypes.data, memory.nbytes)
        return total

    def team(self, threads: int) -> Team | None:
        """A team of `threads` threads for `kernel`, the caller included; None for one thread, or if the
        system refuses more: the caller then computes alone, the same bits."""
        if threads < 2:
            return None
        try:
            return Team(self, threads)
        except OSError as e:
            log.warning(f"{e}: computing with one thread")
            return None


class Team:
    """Threads that share computations, for one calling thread at a time, until `close`."""

    def __init__(self, library: Library, threads: int) -> None:
        """Use `Library.team`."""
        self.threads = threads
        self._library = library
        self.handle: int | None = library._start_team(threads)
        if self.handle is None:
            raise OSError(f"the system does not give {threads} threads")

    def linger(self, nanoseconds: int) -> None:
        """Let the threads spin for so long after each computation: the next one then need not wake them."""
        self._library._linger(self.handle, nanoseconds)

    def close(self) -> None:
        """End the threads. No kernel may use them afterwards."""
        if self.handle is not None:
            self._library._end_team(self.handle)
            self.handle = None


def handle_of(team: Team | None) -> int | None:
    """Returns a team as the functions take it."""
    return None if team is None else team.handle


class Kernel:
    """Computes one geometry. Used by one thread at a time, and holds its scratch memory."""

    def __init__(self, library: Library, geometry: Geometry, team: Team | None) -> None:
        """Use `Library.kernel`."""
        self.geometry = g = geometry
        self._library = library
        self._team = team
        self._weights = g.weights
        self._address = ctypes.addressof(self._weights)
        self._tile_bytes = g.tile_bytes
        self._scratch = Kept()

    def quantize(self, x: Float32) -> Quantized:
        """x float32 [R, inputs]."""
        g = self.geometry
        x = np.require(x, np.float32, ["C", "A"])
        if x.ndim != 2 or x.shape[1] != g.inputs:
            raise ValueError(f"activations {x.shape} for {g.inputs} inputs")
        codes: Codes = np.empty((len(x), g.padded), np.int8)
        factors: Float32 = np.empty((len(x), g.padded // g.group, 2), np.float32)
        if g.bits >= BF16_BITS:
            codes, factors = np.empty((len(x), g.inputs), np.float32), np.empty(0, np.float32)
        self._library._quantize(self._address, x.ctypes.data, len(x), codes.ctypes.data, factors.ctypes.data)
        return Quantized(codes, factors)

    def tiles(self, tiles: Bytes, x: Quantized, rows: NDArray[np.int32]) -> Float32:
        """The sum of the outputs of consecutive tiles for the rows x[rows]: float32 [len(rows), H]. `tiles`:
        uint8 [number * tile_bytes]. Raises IndexError for a row outside x."""
        height = self._check(tiles, x, self._tile_bytes)
        rows = np.require(rows, np.int32, ["C", "A"])
        y = np.empty((len(rows), self.geometry.outputs), np.float32)
        number = len(tiles) // self._tile_bytes
        scratch = self._scratch.reserve(self._library.scratch(self._address, len(rows)))
        self._library._tiles(
            handle_of(self._team), self._address, tiles.ctypes.data, number, _pointers(x), height,
            rows.ctypes.data, len(rows), y.ctypes.data, scratch,
        )  # fmt: skip
        return y

    def _check(self, data: Bytes, x: Quantized, unit: int) -> int:
        """Rows of x. Raises ValueError if weights or activations do not fit this geometry."""
        g = self.geometry
        check_weights(data, unit)
        width, kind = (g.inputs, np.float32) if g.bits >= BF16_BITS else (g.padded, np.int8)
        if x.codes.dtype != kind or x.codes.shape[1:] != (width,) or not x.codes.flags.c_contiguous:
            raise ValueError(f"activations {x.codes.dtype} {x.codes.shape} for {g}")
        groups = (0,) if g.bits >= BF16_BITS else (len(x.codes), g.padded // g.group, 2)
        if x.factors.dtype != np.float32 or x.factors.shape != groups or not x.factors.flags.c_contiguous:
            raise ValueError(f"activations with factors {x.factors.dtype} {x.factors.shape} for {g}")
        return len(x.codes)


class WorkKernel:
    """Computes Works on all tiles of a store. Used by one thread at a time."""

    def __init__(
        self,
        library: Library,
        layout: StoreLayout,
        tiles: Bytes,
        team: Team | None = None,
        ticks: int | None = None,
        guarded: bool = False,
        generation: int = 0,
    ) -> None:
        """`tiles`: uint8 [total_bytes]. `team`: the threads that compute; None: the caller alone. `ticks`:
        address of a 64-bit counter, increased with each tile. `guarded`: a Work that crashes raises
        IndexError; only without a team. `generation`: of the Works."""
        check_weights(tiles, layout.total_bytes)
        g, shape, start = Geometry.of_tiles(layout), layout.shape, tiles.ctypes.data
        self.hidden = shape.hidden
        self._tiles = tiles  # mapped as long as this object lives
        self._memory = Kept()
        self._host = Host(
            handle_of(team), g.weights, start + layout.offset(0, 0), start + layout.head_offset(0, 0),
            generation, shape.layers, shape.experts, shape.tiles,
            layout.layer_stride, layout.expert_stride, layout.tile_bytes,
            layout.head_stride, layout.head_bytes, layout.up_biases if layout.shape.math.bias else 0, ticks,
        )  # fmt: skip
        self._call = library._guarded_work if guarded else library._work
        self._address = ctypes.addressof(self._host)
        self._tally = TallyNumbers()
        self._tally_address = ctypes.addressof(self._tally)

    def compute(self, descriptor: Descriptor, x: Float32, y: Float32) -> Tally:
        """Write y for x, both float32 [the descriptor's rows or more, H] and contiguous. Raises IndexError
        where a number of the descriptor is wrong, MemoryError."""
        work = address_of(descriptor), len(descriptor), address_of(x), x.size, address_of(y), y.size
        while fault := self._call(self._address, *work, self._tally_address):
            if fault != SMALL_BUFFERS:
                checked(fault)
            self._host.memory = self._memory.reserve(self._host.needed)
            self._host.memory_bytes = self._host.needed
        tally = self._tally
        return Tally(tally.mass, tally.left, tally.kept, tally.channels) if tally.channels else NOTHING


def _pointers(x: Quantized) -> Any:
    return ctypes.byref(Activations(x.codes.ctypes.data, x.factors.ctypes.data))


@cache
def load(variant: str) -> Library | str:
    """A variant's library, or in a few words the reason why it cannot be used."""
    spec = PathFinder.find_spec(f"_{variant}", [str(Path(__file__).parent)])
    if spec is None:
        return "not compiled at installation"
    try:
        functions = ctypes.CDLL(spec.origin)
        if functions.tandem_kernels_version() != VERSION:
            return OTHER_VERSION
    except AttributeError:
        return OTHER_VERSION
    except OSError as e:
        return f"cannot be loaded: {e}"
    if (supported := functions.tandem_supported()) <= 0:
        return f"{'the system does not permit' if supported else 'this processor has no'} {VARIANTS[variant]}"
    return Library(variant, functions)


def store_kernel(
    store: Store,
    team: Team | None = None,
    line: ControlLine | None = None,
    guarded: bool = False,
    generation: int = 0,
) -> WorkKernel:
    """Returns what computes Works on a store's tiles; `line` is ticked for each. The rest is as of
    WorkKernel. Raises NotCompiled."""
    ticks = None if line is None else line.address
    return WorkKernel(best(), store.held, store.all_tiles(), team, ticks, guarded, generation)


def best() -> Library:
    """The first variant's library that can be used here. Raises NotCompiled."""
    for name in VARIANTS:
        if isinstance(library := load(name), Library):
            return library
    raise NotCompiled("_portable")
