"""Serves Calibrate in the engine's thread: one calibration at a time. Requests take no steps meanwhile.

The inbox is drained after each step; a cancellation ends the calibration. Only a complete one is written.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import processor
from pipeline.calibration.file import calibration_path, save, summary
from pipeline.calibration.measure import calibrate
from pipeline.calibration.observers import up_of
from pipeline.calibration.reading import CalibrationContext, Findings
from pipeline.errors import PipelineError, RequestError, StepInterrupted, UsageError
from pipeline.models.shapes import short_name
from pipeline.scheduling.job_factory import check_ids
from pipeline.scheduling.scheduler import Scheduler
from pipeline.serving.engine_parts import EngineParts
from pipeline.serving.policy_switch import PolicySwitch
from protocol.files import make_folders
from protocol.messages import Calibrate, Calibrated, Calibrating, Done
from shm.atomic_file import check_creatable
from shm.disk_cache import remove_empty

PROGRESS_SECONDS = 0.2  # between two Calibrating messages
ROOM = 4 << 20  # bytes that the file's disk must have before a calibration; most files have fewer
MOST_TOKENS = 1 << 17


class _Cancelled(Exception):
    """The client has cancelled or disconnected, or the engine is stopped."""


class CalibrationService:
    """Runs the calibration that a client asked for. Used by the engine's thread alone."""

    def __init__(
        self,
        parts: EngineParts,
        policies: PolicySwitch,
        scheduler: Scheduler,
        *,
        send: Callable[[bytes, object], None],
        drain_inbox: Callable[[], bool],
    ) -> None:
        """`drain_inbox` handles the waiting messages; it returns False where the engine is being stopped."""
        self._parts = parts
        self._policies = policies
        self._scheduler = scheduler
        self._send, self._drain_inbox = send, drain_inbox
        self._current: tuple[bytes, int] | None = None
        self._cancelled = False
        self._stopping = False  # the engine
        self._reported = 0.0  # time of the last Calibrating

    @property
    def running(self) -> bool:
        return self._current is not None

    def serve(self, client: bytes, message: Calibrate) -> None:
        """Run a whole calibration, write its file, and answer the client."""
        if self.running:
            reason = "another calibration is running; try again when it has ended"
            self._send(client, Done(message.request, "error", reason, usage=True))
            return
        self._current, self._cancelled = (client, message.request), False
        path = calibration_path(self._parts.config.cache, self._parts.source)
        try:
            make_folders(path.parent)
            check_creatable(path, ROOM)  # before the work
            remove_empty(path.parent)
            answer: object = self._calibrate(client, message, path)
        except (_Cancelled, StepInterrupted):
            answer = Done(message.request, "cancelled")
        except OSError as e:
            reason = f"the calibration {path} cannot be written: {e.strerror or e}"
            answer = Done(message.request, "error", reason)
        except PipelineError as e:
            answer = Done(message.request, "error", str(e), usage=isinstance(e, UsageError))
        finally:
            self._current = None
        self._send(client, answer)

    def cancel(self, client: bytes, request: int) -> None:
        """End this client's own calibration."""
        self._cancelled |= self._current == (client, request)

    def forget(self, client: bytes) -> None:
        """End the calibration of a client that has disconnected."""
        self._cancelled |= self._current is not None and self._current[0] == client

    def ended(self) -> bool:
        """Handle the waiting messages; returns whether one of them has ended the calibration."""
        self._stopping = not self._drain_inbox()
        return self._stopping or self._cancelled

    def _calibrate(self, client: bytes, message: Calibrate, path: Path) -> Calibrated:
        parts, scheduler = self._parts, self._scheduler
        ids = self._ids(message)
        scheduler.prefixes.clear()
        context = CalibrationContext(
            parts.engine,
            parts.store,
            parts.kv,
            scheduler.chunk,
            parts.config.options.max_sequences if parts.engine.backbone.several else 1,
            parts.context,
            parts.config.options.seed,
            up_of(parts.store, parts.engine.bring),
            message.max_loss,
        )

        def report(stage: str, done: int, total: int) -> None:
            now = time.perf_counter()
            if now - self._reported > PROGRESS_SECONDS:
                self._reported = now
                self._send(client, Calibrating(message.request, stage, done, total))
            if self.ended():
                raise _Cancelled

        try:
            calibration, findings = calibrate(context, ids, message.tokens, report)
            about = self._about(findings)
            save(path, calibration, about)
        finally:
            if not self._stopping:
                self._policies.reset()  # the policy may use the new calibration
        return Calibrated(message.request, str(path), summary(calibration, about))

    def _ids(self, message: Calibrate) -> tuple[int, ...]:
        """Returns the ids of the text, which has been encoded before. Raises RequestError."""
        if len(self._parts.engine.stages) > 1:
            raise RequestError("an engine whose layers are on several devices is not calibrated")
        if message.tokens < 1:
            raise RequestError(f"tokens must be at least 1, it is {message.tokens}")
        if message.tokens > MOST_TOKENS:
            raise RequestError(f"tokens must be at most {MOST_TOKENS}, it is {message.tokens}")
        if message.token_ids is None:
            raise RequestError("give exactly one of text and token_ids")
        if message.max_loss is not None and not 0 < message.max_loss < math.inf:
            raise RequestError(f"max_loss must be above 0, it is {message.max_loss:g}")
        check_ids(message.token_ids, self._parts.engine.backbone.facts.vocabulary)
        return message.token_ids

    def _about(self, findings: Findings) -> dict[str, Any]:
        """Returns the circumstances of the calibration."""
        config, options = self._parts.config, self._parts.config.options
        return {
            "model": "the embedded model" if config.model == model_dir() else short_name(config.model),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.node()}: {processor()[0]}, {self._parts.device.describe()}",
            "format": options.format,
            "backbone_dtype": options.backbone_dtype,
            "emulation": options.emulation,
            "tokens": findings.tokens,
            "loss": findings.losses or None,
            "sparsities": findings.sparsities,
            "notes": findings.notes,
        }
