"""Serves Calibrate in the engine's thread: one at a time, and nothing else is computed meanwhile.

Every moment it stops to attend to what waits for the engine's thread: a request is taken in or cancelled, a
client that left is forgotten, and a calibration that nobody wants any more ends. Only a whole one is written.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pipeline.assets import model_dir
from pipeline.calibration.file import calibration_path, save
from pipeline.calibration.measure import BOUND, CalibrationContext, Findings, calibrate
from pipeline.calibration.summary import summary
from pipeline.errors import PipelineError, RequestError, UsageError
from pipeline.models.shapes import short_name
from pipeline.policies.view import PolicyRequest
from pipeline.serving.assembly import Assembly
from protocol.messages import Calibrate, Calibrated, Calibrating, Done

TELL_SECONDS = 0.2  # between two messages about how far it is


class _Unwanted(Exception):
    """The client has cancelled or left, or the engine ends."""


class Calibrations:
    """What clients ask of the engine's thread, which calls all of this."""

    def __init__(self, send: Callable[[bytes, object], None], attend: Callable[[Assembly], bool]) -> None:
        """`attend` does what waits for the engine's thread; False: the engine is to end."""
        self._send, self._attend = send, attend
        self._current: tuple[bytes, int] | None = None
        self._unwanted = False
        self._ending = False  # the engine is
        self._told = 0.0  # when the client last heard how far it is

    @property
    def running(self) -> bool:
        return self._current is not None

    def serve(self, assembly: Assembly, client: bytes, message: Calibrate) -> None:
        """Calibrate from the first token to the file, and answer. Returns when that is over."""
        if self.running:
            reason = "the engine is being calibrated already; ask again when that is over"
            self._send(client, Done(message.request, "error", reason, usage=True))
            return
        self._current, self._unwanted = (client, message.request), False
        try:
            answer: object = self._calibrated(assembly, client, message)
        except _Unwanted:
            answer = Done(message.request, "cancelled")
        except OSError as e:
            answer = Done(message.request, "error", f"the calibration cannot be written: {e}")
        except PipelineError as e:
            answer = Done(message.request, "error", str(e), usage=isinstance(e, UsageError))
        finally:
            self._current = None
        self._send(client, answer)

    def cancel(self, client: bytes, request: int) -> None:
        """End this client's own calibration."""
        self._unwanted |= self._current == (client, request)

    def forget(self, client: bytes) -> None:
        """A client is gone."""
        self._unwanted |= self._current is not None and self._current[0] == client

    def _calibrated(self, assembly: Assembly, client: bytes, message: Calibrate) -> Calibrated:
        given = _tokens(assembly, message)
        tokens = given[: message.tokens]
        told, scheduler, engine = assembly.told, assembly.scheduler, assembly.engine
        shop = CalibrationContext(
            engine,
            assembly.store,
            scheduler.kv,
            scheduler.chunk,
            told.config.max_sequences,
            assembly.context,
            told.config.seed,
        )
        before = assembly.stats()
        began = time.perf_counter()

        def tell(stage: str, done: int, total: int) -> None:
            now = time.perf_counter()
            if now - self._told > TELL_SECONDS:
                self._told = now
                self._send(client, Calibrating(message.request, stage, done, total))
            self._ending = not self._attend(assembly)
            if self._ending or self._unwanted:
                raise _Unwanted

        try:
            calibration, findings = calibrate(shop, tokens, tell)
            about = _about(assembly, before, findings)
            about |= {"tokens": len(tokens), "left_out": len(given) - len(tokens)}
            about["seconds"]["all"] = time.perf_counter() - began
            path = calibration_path(told.cache, assembly.source)
            save(path, calibration, about)
        finally:
            if not self._ending:  # made anew: it may plan with what is known now
                assembly.set_policy(PolicyRequest(before["policy"], before["policy_options"]))
        return Calibrated(message.request, str(path), summary(calibration, about))


def _tokens(assembly: Assembly, message: Calibrate) -> list[int]:
    """The text's. Raises RequestError."""
    if message.tokens < 1:
        raise RequestError(f"tokens must be at least 1, it is {message.tokens}")
    if (message.text is None) == (message.token_ids is None):
        raise RequestError("give exactly one of text and token_ids")
    if message.token_ids is not None:
        vocabulary = assembly.engine.backbone.spec.vocabulary
        wrong = [token for token in message.token_ids if not 0 <= token < vocabulary]
        if wrong:
            raise RequestError(f"token id {wrong[0]} is outside the vocabulary of {vocabulary}")
        return list(message.token_ids)
    if assembly.tokenizer is None:
        raise RequestError("a text needs a tokenizer, and this model has none; give token ids")
    return assembly.tokenizer.encode(message.text or "")


def _about(assembly: Assembly, before: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """How it was found out."""
    told = assembly.told
    config = told.config
    return {
        "model": "the embedded model" if told.model == model_dir() else short_name(told.model),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.node()}: {assembly.device.describe()}",
        "format": config.format,
        "backbone_dtype": config.backbone_dtype,
        "emulation": config.emulation,
        "experts_of_a_token": assembly.engine.shape.top_k,
        "loss": findings.losses | {"bound": BOUND} if findings.losses else None,
        "seconds": findings.seconds,
        "notes": findings.notes,
        "costs": before.get("costs"),
    }
