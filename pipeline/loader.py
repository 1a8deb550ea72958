"""The loader process: makes sure that the store of a model is in shared memory, says so, and exits.

It takes the shortest way there is: the segment itself if another engine has it or left it; the cached
file; the checkpoint, and meanwhile it writes the cached file. No file is kept where it would not be a shorter
way: a store in the checkpoint's own numbers (bf16 of BF16, f32 of F32) is read from the checkpoint again, and
the random weights of a shape are drawn again. Looking and building happen under the store's build lock, so
engines that start together share one store. It imports no torch: on a small model nearly all of its time
would be that import.

What is damaged is made again, with one line that says so, and never while another engine uses it. A cached
file's checksums are compared whenever it is read; a store in memory, and the cached file beside it, are
compared when that is asked for (`verify`), because attaching else takes no time at all.

A store's first user is the supervisor, not this process: after Ready it takes a StoreLease, and where that
raises SegmentMissing (the last user of an attached store left just then) it starts the loader again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import zmq

from pipeline.checkpoint.open import open_model
from pipeline.errors import UsageError
from pipeline.models.registry import expert_shape
from pipeline.text.tokenizer import Tokenizer
from protocol.codec import decode, encode
from protocol.messages import VERSION, Failed, Progress, Ready, Shutdown
from protocol.sockets import connect_dealer, ipc_endpoint
from shm.cache_record import CacheRecord, note_use
from shm.cache_writer import CacheWriter, write_cache
from shm.disk_cache import CachedStore, store_path, sweep_cache
from shm.errors import NotEnoughMemory, SegmentMissing, ShmError, StoreDamaged, StoreInvalid, UnknownFormat
from shm.layout import format_named
from shm.locks import build_lock, remove_unused, sweep
from shm.manifest import StoreManifest, store_bytes
from shm.segment import byte_size, check_space, unlink
from shm.store import Store, StoreBuilder, store_name

ROLE = "loader"
LONG = 1 << 30  # bytes of a store that takes longer to fill than a tokenizer to load
PROGRESS_SECONDS = 0.1
T = TypeVar("T")
log = logging.getLogger(ROLE)


class Stopped(Exception):
    """The supervisor asked this process to end."""


class Control:
    """The supervisor's socket: progress out, Shutdown in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], runtime: Path, identity: bytes) -> None:
        self._socket = connect_dealer(context, ipc_endpoint(runtime, "control.sock"), identity=identity)
        self._next = 0.0  # monotonic seconds: before then, only a stage's end is reported

    def send(self, message: Ready | Failed) -> None:
        self._socket.send_multipart(encode(message))

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """A callback that reports this stage's bytes, about ten times a second. It raises Stopped."""

        def report(done: int) -> None:
            now = time.monotonic()
            if now >= self._next or done == total:
                self._next = now + PROGRESS_SECONDS
                with contextlib.suppress(zmq.Again):  # a report may be lost; a wait for its reader may not be
                    self._socket.send_multipart(encode(Progress(name, done, total)), zmq.DONTWAIT)
                self._check()

        return report

    def _check(self) -> None:
        while self._socket.poll(0):
            if isinstance(decode(self._socket.recv_multipart()), Shutdown):
                raise Stopped

    def close(self) -> None:
        self._socket.close()


class Loading:
    """One store on its way into shared memory. `origin` says in the end where its bytes came from."""

    def __init__(self, config: dict[str, Any], control: Control) -> None:
        """Read the checkpoint's headers. Raises UsageError, UnknownFormat."""
        self.control = control
        self.source = open_model(Path(config["model"]))
        shape = expert_shape(self.source.config, config["tile"], format_named(config["format"]))
        self.fingerprint = self.source.fingerprint(config["format"], shape.tile)
        self.manifest = StoreManifest(self.fingerprint, shape, config["format"], self.source.name)
        self.size = store_bytes(self.manifest)
        self.kept = self.source.worth_keeping(config["format"])  # whether there is to be a cached file
        self.name = store_name(self.fingerprint)
        self.root = Path(config["runtime"]).parent
        self.cache_folder = Path(config["cache_dir"])
        self.reserve: int = config["reserve_bytes"]
        self.verify: bool = config["verify"]
        self.nodes: list[int] = config["nodes"]
        self.origin = ""
        self.notes: tuple[str, ...] = ()

    def run(self) -> None:
        """Have a ready store under `name`. Raises NotEnoughMemory, ModelError, ShmError, Stopped."""
        for path in sweep_cache(self.cache_folder):
            log.warning(f"removed the half-written {path}, left by a loader that was killed")
        waiting = self.control.stage("waiting for another engine that loads this model", 1)
        with build_lock(self.fingerprint, self.root, lambda: waiting(0)):
            if self._attached():
                origin, read, cached = "attached", 0, 0
                if self.verify and self.kept:
                    self._verify_cache()
            elif self._from_cache():
                origin, read, cached = "cache", 0, self.size
            else:
                origin, read, cached = self.source.kind, self._from_source(), 0
        if (path := store_path(self.cache_folder, self.fingerprint)).exists():
            note_use(path.parent, CacheRecord("store", self.source.name, self.manifest.format))
        self.origin = (
            f"source {origin}: {read} bytes read from the checkpoint, {cached} bytes read from the cache"
        )

    def _attached(self) -> bool:
        """Whether a store that can be used is there; what cannot be is removed. Raises ShmError where another
        engine uses it all the same."""
        try:
            with Store.attach(self.name, self.fingerprint) as store:
                if self.verify:
                    store.verify(self.control.stage("verifying the store", store.layout.total_bytes))
        except SegmentMissing:
            return False
        except (StoreInvalid, StoreDamaged) as e:
            if not remove_unused(self.name):
                raise ShmError(f"{e}, and another engine uses it: end that engine, then start again") from e
            log.warning(f"{e}; it is removed and made again")
            return False
        return True

    def _verify_cache(self) -> None:
        """Compare the cached file, if there is one, and write it again from memory where it is damaged."""
        try:
            cached = CachedStore.open(self.cache_folder, self.fingerprint)
            if cached is not None:
                with cached:
                    cached.verify(self.control.stage("verifying the cache", self.manifest.layout.total_bytes))
        except (StoreInvalid, StoreDamaged) as e:
            log.warning(f"{e}; it is written again from the store in memory")
            self._save()

    def _builder(self) -> StoreBuilder:
        """The new segment, once there is room for it."""
        for name in sweep(self.root):
            log.warning(f"removed the store {name}, which nobody uses")
        check_space(self.size, self.reserve)
        allocating = self.control.stage("allocating", self.size)
        builder = StoreBuilder.create(self.name, self.manifest, allocating, self.nodes)
        self.notes = builder.notes
        return builder

    def _from_cache(self) -> bool:
        if not self.kept:
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
        """The number of the weights' bytes that were read."""
        if self.size >= LONG:
            Tokenizer.load(Path(self.source.name))  # which else fails when all the work is done
        with self._writer() as writer:
            builder = self._builder()
            if writer is not None:
                builder.keep = writer.write
            read, manifest = self._fill(builder, self.source.fill, self.source.filling)
            try:
                if writer is not None:
                    with _warned():
                        writer.finish(manifest, self.control.stage("writing the cache", self.size))
            except BaseException:
                unlink(self.name)
                raise
        return read

    def _writer(self) -> AbstractContextManager[CacheWriter | None]:
        """The new cached file, where there is to be one and that is possible."""
        if self.kept:
            with _warned():
                return CacheWriter(self.cache_folder, self.manifest)
        return nullcontext()

    def _fill(
        self, builder: StoreBuilder, fill: Callable[[StoreBuilder, Callable[[int], None]], T], stage: str
    ) -> tuple[T, StoreManifest]:
        """What `fill` returns, and the manifest of the store, which is ready then."""
        try:
            result = fill(builder, self.control.stage(stage, self.manifest.layout.total_bytes))
            manifest = builder.finish()
        except BaseException:
            builder.discard()
            raise
        return result, manifest

    def _save(self) -> None:
        """Keep the store in memory on disk, where that is possible."""
        with _warned(), Store.attach(self.name, self.fingerprint) as store:
            write_cache(self.cache_folder, store, self.control.stage("writing the cache", self.size))


@contextmanager
def _warned() -> Iterator[None]:
    """A store that cannot be kept on disk is used all the same."""
    try:
        yield
    except OSError as e:
        log.warning(f"the store could not be kept on disk, the next start reads the checkpoint again: {e}")


def main(config: dict[str, Any]) -> int:
    """The loader's life; the exit code."""
    started = time.monotonic()
    with zmq.Context[zmq.Socket[bytes]]() as context:
        control = Control(context, Path(config["runtime"]), config["identity"])
        try:
            loading = Loading(config, control)
            loading.run()
        except Stopped:
            return 0
        except (UsageError, NotEnoughMemory, UnknownFormat) as e:
            return _fail(control, str(e), usage=True)
        except ShmError as e:
            return _fail(control, str(e), usage=False)
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
                    incarnation=config["incarnation"],
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
