"""The sockets of an expert worker or the prefetcher, their Ready and their Shutdown.

A child has two DEALER sockets: `control` to the supervisor and `work` to the coordinator. It announces itself
on both, then serves until one of them sends Shutdown.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import VERSION, Failed, Ready, Shutdown
from protocol.sockets import connect_dealer, ipc_endpoint

POLL_LIMIT_MS = 1000  # longest wait, so that a lost wake-up costs at most a second

log = logging.getLogger(__name__)


class ChildEndpoint:
    """One child's two sockets. Not thread-safe: used by the thread that created it."""

    def __init__(self, config: dict[str, Any], work_socket: str, supervised: bool = True) -> None:
        self.role: str = config["role"]
        self.index: int = config["index"]
        self.generation: int = config["generation"]
        self._fingerprint: str = config["fingerprint"]
        self._context = zmq.Context()
        runtime = Path(config["runtime"])
        name: bytes = config["identity"]
        self._work = connect_dealer(self._context, ipc_endpoint(runtime, work_socket), identity=name)
        self._sockets = [self._work]
        if supervised:
            endpoint = ipc_endpoint(runtime, "control.sock")
            self._sockets.append(connect_dealer(self._context, endpoint, identity=name))
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self.stopped = False

    def wake_by(self, descriptor: int) -> None:
        """Have `receive` end its wait also when this descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def announce(self, notes: tuple[str, ...] = ()) -> None:
        """Send Ready to the coordinator and the supervisor."""
        ready = Ready(VERSION, self.role, self.index, self.generation, os.getpid(), self._fingerprint, notes)
        for socket in self._sockets:
            socket.send_multipart(encode(ready))

    def fail(self, text: str, usage: bool = False) -> None:
        """Send the supervisor the reason why this process exits. `usage`: the user's input is at fault."""
        self._sockets[-1].send_multipart(encode(Failed(self.role, text, usage)))

    def send(self, message: object) -> None:
        """Send to the coordinator. Large arrays are not copied: do not change them afterwards."""
        frames = encode(message)
        self._work.send_multipart(frames, copy=sum(map(len, frames)) < 65536)

    def receive(self, wait: bool, limit_ms: int = POLL_LIMIT_MS) -> Iterator[object]:
        """Yield the messages that have arrived; with `wait`, wait for one, at most `limit_ms`. A Shutdown
        only sets `stopped`. A malformed message is logged and dropped."""
        ready = dict(self._poller.poll(limit_ms if wait else 0))
        for socket in self._sockets:
            while socket in ready and not self.stopped:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    message = decode(frames)
                except MalformedMessage as e:
                    log.warning("dropped a malformed message: %s", e)
                    continue
                if isinstance(message, Shutdown):
                    self.stopped = True
                else:
                    yield message

    def close(self) -> None:
        """Send queued messages (for at most the sockets' linger time) and close."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
