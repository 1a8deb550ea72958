"""The loader process: puts a model's store into shared memory, reports Ready, and exits.

It uses the fastest source available: a segment in memory; the disk cache; the checkpoint, while writing the
disk cache. A store is not cached on disk where that would not be faster: with the checkpoint's own bits, or
random weights. The loader holds the store's build lock meanwhile, so engines that start together share one
store. It imports no torch, which on a small model would take nearly all of its time.

An invalid store or a damaged cached file is written again, with a warning, but never while another engine
uses it. A cached file's checksums are verified whenever it is read.

The store's first user is the supervisor: where its StoreLease raises SegmentMissing after Ready (the last
user of an attached store has just left), it starts the loader again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import zmq

from pipeline.checkpoint.open import open_model
from pipeline.errors import UsageError
from pipeline.models.facts import expert_shape, narrowed
from protocol.codec import decode, encode
from protocol.messages import VERSION, Failed, Progress, Ready, Shutdown
from protocol.sockets import connect_dealer, ipc_endpoint
from shm.atomic_file import warn_unkept
from shm.disk_cache import (
    CachedStore,
    CacheRecord,
    CacheWriter,
    note_use,
    store_path,
    sweep_cache,
)
from shm.errors import (
    NotEnoughDisk,
    NotEnoughMemory,
    SegmentMissing,
    ShmError,
    StoreDamaged,
    StoreInvalid,
    UnknownFormat,
)
from shm.layout import Bytes, format_named, part_of
from shm.locks import StoreLease, build_lock, remove_unused, sweep
from shm.segment import byte_size, check_space, free_space, unlink
from shm.store import Store, StoreBuilder, StoreManifest, own_fingerprint, store_bytes, store_name

ROLE = "loader"
PROGRESS_SECONDS = 0.1
# Of what is free, beside a budget that may shrink: the segments of who uses the store.
LEFT_SHARE, LEFT_BYTES = 16, 1 << 24
DELIVERY_MS = 10_000  # for the last message: a store in memory is attached before the socket is connected
log = logging.getLogger(ROLE)


class Stopped(Exception):
    """Raised when the supervisor sends Shutdown."""


class Control:
    """The socket to the supervisor: sends progress, receives Shutdown."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], runtime: Path, identity: bytes) -> None:
        self._socket = connect_dealer(context, ipc_endpoint(runtime, "control.sock"), identity=identity)
        self._next = 0.0  # monotonic seconds; until then only the end of a stage is reported

    def send(self, message: Ready | Failed) -> None:
        """Send the last message."""
        self._socket.setsockopt(zmq.LINGER, DELIVERY_MS)
        self._socket.send_multipart(encode(message))

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """A callback that reports the stage's bytes, about ten times a second, and raises Stopped."""

        def report(done: int) -> None:
            now = time.monotonic()
            if now >= self._next or 0 < done == total:
                self._next = now + PROGRESS_SECONDS
                with suppress(zmq.Again):  # a lost report is better than a loader that blocks
                    self._socket.send_multipart(encode(Progress(name, done, total)), zmq.DONTWAIT)
                while self._socket.poll(0):
                    if isinstance(decode(self._socket.recv_multipart()), Shutdown):
                        raise Stopped

        return report

    def close(self) -> None:
        self._socket.close()


class Stages(Protocol):
    """Is told how far a load is: `Control`, or an expert host."""

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """As `Control.stage`."""


class Loading:
    """Loads one store into shared memory. After `run`, `origin` describes the source of its bytes."""

    def __init__(self, config: dict[str, Any], control: Stages) -> None:
        """Read the checkpoint's headers. Raises UsageError, UnknownFormat."""
        self.control = control
        self.source = open_model(Path(config["model"]))
        shape = expert_shape(self.source.config, config["tile"], format_named(config["format"]))
        self.whole = self.fingerprint = self.source.fingerprint(config["format"], shape.tile)
        if (part := part_of(config.get("part"))) is not None:
            shape, self.fingerprint = narrowed(part, shape), part.fingerprint(self.whole)
        self.manifest = StoreManifest(self.fingerprint, shape, config["format"], self.source.name, part=part)
        self.size = store_bytes(self.manifest)
        self.cached = self.source.worth_keeping(config["format"])  # whether the disk cache is used
        self.cache_folder = Path(config["cache_dir"])
        self.in_file = self.manifest  # of the file in the disk cache
        self.budget: int | None = config.get("host_memory")  # bytes of experts in memory, of a partial store
        self.least: int | None = None  # bytes to which the budget may shrink; None: not at all
        if self.budget is not None:
            path = store_path(self.cache_folder, self.fingerprint)
            self.fingerprint = own_fingerprint(self.fingerprint, Path(config["runtime"]))
            self.manifest = replace(self.manifest, fingerprint=self.fingerprint, file=str(path))
        self.reserve: int = config["reserve_bytes"]
        self.nodes: list[int] = config["nodes"]
        self.origin = ""
        self.notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns the name of the store's segment."""
        return store_name(self.fingerprint)

    def load(self) -> None:
        """Make a ready store under `name`. Raises NotEnoughMemory, ModelError, ShmError, Stopped."""
        with self._locked():
            self._make()

    def load_leased(self) -> StoreLease:
        """Make a ready store and lease it, which no start of another engine removes in between. Raises as
        `load`."""
        with self._locked():
            self._make()
            with suppress(SegmentMissing):  # where it was attached, and its last user has just left
                return StoreLease.acquire(self.fingerprint)
            self._make()
            return StoreLease.acquire(self.fingerprint)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        for path in sweep_cache(self.cache_folder):
            log.warning(f"removed the half-written {path}, left by a loader that was killed")
        waiting = self.control.stage("waiting for another engine that loads this model", 0)
        with build_lock(self.in_file.fingerprint, lambda: waiting(0)), self._own_lock():
            yield

    def _make(self) -> None:
        if self.budget is not None:
            origin, read, cached = self._on_disk()
        elif self._attached():
            origin, read, cached = "attached", 0, 0
        elif self._from_cache():
            origin, read, cached = "cache", 0, self.size
        else:
            origin, read, cached = self.source.kind, self._from_source(), 0
        if (path := store_path(self.cache_folder, self.in_file.fingerprint)).exists():
            note_use(path.parent, CacheRecord("store", self.source.name, self.manifest.format))
        self.origin = (
            f"source {origin}: {byte_size(read)} read from the checkpoint, {byte_size(cached)} from the cache"
        )

    def _own_lock(self) -> AbstractContextManager[None]:
        """The build lock of a partial store, which has another name than its file: without it the start of
        another engine takes the segment for one that nobody uses."""
        return build_lock(self.fingerprint) if self.budget is not None else nullcontext()

    def _on_disk(self) -> tuple[str, int, int]:
        """Make a partial store without any expert, and its file where there is none; returns the origin of
        its bytes, those of weights read, and those of the file. Raises NotEnoughDisk where that cannot be
        written."""
        remove_unused(self.name)  # of a process before that was killed: nobody else's, and its memory counts
        self.manifest = replace(self.manifest, frames=0)
        try:
            found = CachedStore.open(self.cache_folder, self.in_file.fingerprint)
        except StoreInvalid as e:
            log.warning(f"{e}; it is made again from the checkpoint")
            found = None
        if found is not None:
            with found:
                self._with_frames().finish()
            return "disk", 0, self.size
        with _needed_on_disk(self.manifest.file):
            opened = CacheWriter(self.cache_folder, self.in_file)
        with opened as writer:
            return self.source.kind, self._through(writer), 0

    def _through(self, writer: CacheWriter) -> int:
        """Fill the file layer by layer, by way of a store that has pages for the present one alone; then make
        that with frames. Returns the bytes of weights read."""
        builder = self._builder()

        def keep(layer: int, data: Bytes) -> None:
            with _needed_on_disk(self.manifest.file):
                writer.write_through(layer, data)
            builder.forget(layer)

        builder.keep = keep
        read = self._fill(builder, self.source.fill, self.source.filling)
        try:
            with _needed_on_disk(self.manifest.file):
                writer.finish(self.control.stage("writing the cache", self.size))
        finally:
            unlink(self.name)
        self._with_frames().finish()
        return read

    def _with_frames(self) -> StoreBuilder:
        """Create the segment of a partial store, once its file is there."""
        assert self.budget is not None
        self._sweep()  # before what is free is counted
        if (budget := self._needed()) < self.budget:
            log.warning(f"of the {byte_size(self.budget)} meant for experts {byte_size(budget)} are free")
        self.manifest = replace(self.manifest, frames=budget // self.manifest.layout.expert_pages)
        return self._builder()

    def _attached(self) -> bool:
        """Returns whether a usable store exists. An invalid one is removed; ShmError where another engine
        uses it."""
        try:
            Store.attach(self.name, self.fingerprint).close()
        except SegmentMissing:
            return False
        except StoreInvalid as e:
            if not remove_unused(self.name):
                raise ShmError(f"{e}, and another engine uses it: end that engine, then start again") from e
            log.warning(f"{e}; it is removed and made again")
            return False
        return True

    def _builder(self) -> StoreBuilder:
        """Create the segment, after removing unused ones. Raises NotEnoughMemory."""
        self._sweep()
        sparse = self.budget is not None and not self.manifest.frames
        check_space(self._needed(), self.reserve)
        allocating = self.control.stage("allocating", store_bytes(self.manifest))
        builder = StoreBuilder.create(self.name, self.manifest, allocating, self.nodes, sparse)
        self.notes = builder.notes
        return builder

    def _sweep(self) -> None:
        for name in sweep():
            log.warning(f"removed the unused store {name}")

    def _needed(self) -> int:
        """Returns the bytes of experts in memory: of a budget that may shrink, what is free now. Raises
        NotEnoughMemory for less than `least`."""
        if (budget := self.budget) is None or (least := self.least) is None:
            return self.size if budget is None else budget
        free = free_space(self.reserve)
        free = max(0, free - free // LEFT_SHARE - LEFT_BYTES)
        if min(budget, least) > free:
            raise NotEnoughMemory(
                f"experts read from disk need {byte_size(least)} of memory, and {byte_size(free)} are free"
            )
        return min(budget, free)

    def _from_cache(self) -> bool:
        """Fill the store from the disk cache; False where it has no valid file."""
        if not self.cached:
            return False
        try:
            cached = CachedStore.open(self.cache_folder, self.fingerprint)
            if cached is None:
                return False
            with cached:
                self._fill(self._builder(), cached.fill, "reading the cache")
        except (StoreInvalid, StoreDamaged) as e:
            log.warning(f"{e}; it is made again from the checkpoint")
            return False
        return True

    def _from_source(self) -> int:
        """Fill the store from the model source; returns the bytes of weights read."""
        with self._writer() as writer:
            builder = self._builder()
            if writer is not None:
                builder.keep = writer.write
            read = self._fill(builder, self.source.fill, self.source.filling)
            try:
                if writer is not None:
                    with _cache_optional():
                        writer.finish(self.control.stage("writing the cache", self.size))
            except BaseException:
                unlink(self.name)
                raise
        return read

    def _writer(self) -> AbstractContextManager[CacheWriter | None]:
        """A writer of the cached file; None where it is not wanted or cannot be created."""
        if self.cached:
            with _cache_optional():
                return CacheWriter(self.cache_folder, self.manifest)
        return nullcontext()

    def _fill(
        self, builder: StoreBuilder, fill: Callable[[StoreBuilder, Callable[[int], None]], int], stage: str
    ) -> int:
        """Fill the store and mark it ready; returns the bytes read."""
        try:
            read = fill(builder, self.control.stage(stage, self.manifest.layout.total_bytes))
            builder.finish()
        except BaseException:
            builder.discard()
            raise
        return read


@contextmanager
def _needed_on_disk(file: str) -> Iterator[None]:
    """Turn a failure to write the file of a partial store into a NotEnoughDisk."""
    try:
        yield
    except OSError as e:
        what = "the experts that memory does not hold must be on disk"
        raise NotEnoughDisk(f"{what}, and {file} cannot be written: {e.strerror}") from None


@contextmanager
def _cache_optional() -> Iterator[None]:
    """Turn a failure to write the cached file into a warning."""
    try:
        yield
    except OSError as e:
        warn_unkept(log, "the store could not be kept on disk, the next start reads the checkpoint again", e)


def main(config: dict[str, Any]) -> int:
    """Run the loader; returns the exit code."""
    started = time.monotonic()
    with zmq.Context[zmq.Socket[bytes]]() as context:
        control = Control(context, Path(config["runtime"]), config["identity"])
        try:
            loading = Loading(config, control)
            loading.load()
        except Stopped:
            return 0
        except (UsageError, NotEnoughMemory, NotEnoughDisk, UnknownFormat) as e:
            return _fail(control, str(e), usage=True)
        except ShmError as e:
            return _fail(control, str(e), usage=False)
        except OSError as e:  # a full disk, for example
            return _fail(control, f"loading failed: {e}", usage=False)
        except Exception as e:
            log.exception("loading failed")
            return _fail(control, f"loading failed: {type(e).__name__}: {e}", usage=False)
        else:
            log.debug(f"{byte_size(loading.size)} in {time.monotonic() - started:.2f} s; {loading.origin}")
            control.send(
                Ready(
                    version=VERSION,
                    role=ROLE,
                    index=0,
                    generation=config["generation"],
                    pid=os.getpid(),
                    fingerprint=loading.fingerprint,
                    notes=(loading.origin, *loading.notes),
                )
            )
            return 0
        finally:
            control.close()


def _fail(control: Control, text: str, usage: bool) -> int:
    control.send(Failed(ROLE, text, usage))
    return 2 if usage else 1
