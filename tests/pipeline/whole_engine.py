"""The engine of a coordinator without other processes: it computes in this one (`--workers 0`), with the
prefetcher as a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from child_messages import KEY, control_segment
from failing_prefetcher import start_prefetcher
from mover_parts import random_store

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.checkpoint.open import open_model
from pipeline.config import CoordinatorConfig, ResolvedConfig
from pipeline.experts.peers import ExitEvents
from pipeline.models.facts import expert_shape
from pipeline.serving.engine_inbox import EngineEvent, EngineInbox, EngineMessage, ToClients
from pipeline.serving.engine_parts import EngineParts
from pipeline.serving.engine_service import EngineService
from pipeline.serving.policy_switch import PolicySwitch
from pipeline.serving.text_queue import TextMessages, with_ids
from pipeline.text.detokenizer import DECODER
from pipeline.text.process import encoded
from pipeline.text.tokenizer import Tokenizer, has_tokenizer
from protocol.messages import Calibrate, Generate, Needed, Score
from protocol.sockets import Identity
from shm.layout import format_named

CONTEXT = 64
TEXT_UP = threading.Event()  # a text process has loaded the tokenizer
TEXT_UP.set()
IDENTITY = Identity("coordinator", 0, 0)
OPTIONS = ResolvedConfig(
    device="cpu",
    format="f32",  # as the random store's
    backbone_dtype="f32",
    tile=32,
    workers=0,
    expert_cache=13 / 24,  # of the tiles
    context=CONTEXT,
    kv_tokens=4 * CONTEXT,
    max_sequences=3,
    chunk=32,
    seed=5,
)


@contextmanager
def coordinator_map(model: Path, folder: Path, options: ResolvedConfig = OPTIONS) -> Iterator[dict[str, Any]]:
    """The configuration that a supervisor gives to a coordinator; its store and control segment exist."""
    folder.chmod(0o700)
    if has_tokenizer(model) and (tokenizer := Tokenizer.load(model)) is not None:
        tokenizer.decoder.write(folder / DECODER)
    shape = expert_shape(open_model(model).config, 32, format_named("f32"))
    with random_store(shape, str(folder)) as store, control_segment(options.workers) as control:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
        yield {
            **asdict(IDENTITY),
            "identity": IDENTITY.prove(KEY),
            "engine": "whole",
            "runtime": str(folder),
            "key": KEY,
            "suspects": [],
            "control": control.segment.name,
            "store": store.segment.name,
            "fingerprint": store.fingerprint,
            "model": str(model),
            "cache_dir": str(folder / "cache"),
            "workers": [1] * options.workers,
            "nodes": 1,
            "slab": False,
            "config": plain,
        }


class Inbox(EngineInbox):
    """An inbox with the seconds for which its reader wanted to wait, in vain; it is stopped at the first of
    these waits at which `until` holds."""

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._until = until

    def get(self, wait: float) -> tuple[bytes, EngineMessage] | None:
        item = super().get(0.0)
        if item is None and wait and not self.stopped:
            self.waits.append(wait)
            if self._until():
                self.stop()
            else:
                time.sleep(0.001)
        return item


class WholeEngine:
    """An engine's parts. The test's own thread is the engine's."""

    def __init__(self, config: CoordinatorConfig, closing: ExitStack) -> None:
        self.config = config
        self.reports: list[object] = []
        self.exits = ExitEvents()
        self._closing = closing
        self.parts = EngineParts(config, self.exits, self._report, closing, TEXT_UP)
        self.events: list[EngineEvent] = []
        self.congested: Callable[[bytes], bool] = lambda client: False

    def _report(self, message: object) -> None:
        """To the supervisor, which starts the prefetcher that is needed."""
        self.reports.append(message)
        if isinstance(message, Needed):
            parts = self.parts
            for index in range(max(1, len(self.config.options.stages))):
                socket, line = parts.sockets["prefetcher"], parts.control.line("prefetcher", index)
                started = start_prefetcher(self.config.runtime, parts.store, socket, line, index=index)
                self._closing.callback(started)

    def policies(self, **options: Any) -> PolicySwitch:
        """The configured policy is in use, with these options changed."""
        self.parts.config = replace(self.config, options=replace(self.config.options, **options))
        return PolicySwitch(self.parts)

    def service(self, inbox: EngineInbox, **options: Any) -> EngineService:
        """A new service on these parts, with these options changed."""
        self.parts.config = replace(self.config, options=replace(self.config.options, **options))
        return EngineService(self.parts, inbox, self.events.append, lambda client: self.congested(client))

    def serve(self, *messages: EngineMessage, client: bytes = b"c") -> Any:
        """Serve these messages of a client on a new service until no request is left; what is sent to it."""
        inbox = Inbox()
        service = self.service(inbox)
        for message in messages:
            assert inbox.put(client, self.with_ids(message))
        service.serve()
        return self.sent(client)

    def with_ids(self, message: EngineMessage) -> EngineMessage:
        """A message with its text encoded, as the event loop passes it on."""
        if not isinstance(message, Generate | Score | Calibrate):
            return message
        asked = TextMessages(self.parts.detokenizer, self.parts.context).to_encode(message)
        return message if asked is None else with_ids(message, encoded(self.tokenizer, asked))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.load(self.config.model)
        assert tokenizer is not None
        return tokenizer

    def to_clients(self) -> list[tuple[bytes, Any]]:
        """The clients' messages so far."""
        return [pair for event in self.events if isinstance(event, ToClients) for pair in event.messages]

    def sent(self, client: bytes = b"c") -> list[Any]:
        """The messages to a client so far."""
        return [message for to, message in self.to_clients() if to == client]

    def prefill(self) -> None:
        """One step of two tokens."""
        sequence = self.parts.kv.allocate(2)
        self.parts.engine.step([StepInput(TokenSpan(sequence, [5, 6]), "none")], "prefill")
        self.parts.kv.release(sequence)


@contextmanager
def whole_engine(model: Path, folder: Path, options: ResolvedConfig = OPTIONS) -> Iterator[WholeEngine]:
    with coordinator_map(model, folder, options) as config, ExitStack() as closing:
        yield WholeEngine(CoordinatorConfig.from_map(config), closing)
