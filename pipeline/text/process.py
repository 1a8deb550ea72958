"""Process entry: all that a model's own programs do with texts, for the coordinator. It encodes texts,
renders conversations, and follows the grammars of answers.

A chat template is a program, a tokenizer may search with any regular expression, and a grammar may have any
depth: on some input they do not end, fill the memory, or crash their library. In a process of its own they
hold up no step of the engine, and can be killed. Texts, and compilations of grammars, run one after the other
in threads, while the main thread makes masks. It has the model's files, a socket to the coordinator and to
the supervisor, and no others.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import ModelError, RequestError
from pipeline.models.transformers_log import to_own_log
from pipeline.text.detokenizer import DECODER
from pipeline.text.grammar import GRAMMAR_MEMORY, Grammars, check_grammar
from pipeline.text.tokenizer import LOAD_SECONDS, MEMORY, Tokenizer, one_line
from protocol.messages import Allowed, Encode, Encoded, Follow, Unfollow
from workers.child_endpoint import ChildEndpoint
from workers.lifetime import limit_memory, visible_stream

NICENESS = 5  # of the threads that compute steps, each gets three times as much of a core
ENDING = 64  # characters; the templates that begin an answer write a line or two
STACK = 256 << 20  # bytes; the longest chain of rules that fits a grammar's text takes 100 MB
MOST_IDS = 1 << 22  # of one answer: as many as a message has bytes


def encoded(tokenizer: Tokenizer, asked: Encode) -> Encoded:
    """Answer an Encode."""
    try:
        if asked.grammar:
            check_grammar(asked.grammar)
        ids: list[int] = []
        ending = ""
        if asked.messages is not None:
            prompt = tokenizer.prompt(asked.messages, asked.template)
            ids, ending = tokenizer.encode_prompt(prompt), prompt[-ENDING:]
        elif asked.text is not None:
            ids = tokenizer.encode(asked.text)
        if len(ids) > MOST_IDS:
            raise RequestError(f"the text has {len(ids)} tokens, more than {MOST_IDS}")
        return Encoded(np.array(ids, np.int32), ending=ending)
    except RequestError as e:
        reason = str(e)
    except MemoryError:
        reason = "the text takes too much memory to encode"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises any; its panics are no Exception
        reason = f"the model's tokenizer failed: {one_line(e)}"
    # A template may name half a character in its refusal.
    return Encoded(np.empty(0, np.int32), error=reason.encode(errors="replace").decode())


def main(config: dict[str, Any]) -> int:
    """Run the text process; returns its exit code."""
    _close_inherited(lifeline=int(sys.argv[-1]))
    endpoint = ChildEndpoint(config, "text.sock")
    try:
        tokenizer = _load(Path(config["model"]), Path(config["runtime"]))
        endpoint.announce()
        os.nice(NICENESS)
        _serve(endpoint, tokenizer)
    except ModelError as e:
        endpoint.fail(str(e), usage=True)
        return 2
    finally:
        endpoint.close()
    return 0


def _load(model: Path, runtime: Path) -> Tokenizer:
    """Load the model's tokenizer within the limits, and write what the coordinator needs of it. The kernel
    ends the process at a limit, also within the library."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - takes memory, and time on a cold disk

    to_own_log()
    limit_memory(MEMORY)
    _silence_panics()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, LOAD_SECONDS)
    tokenizer = Tokenizer.load(model)
    if tokenizer is None:
        raise ModelError(f"the tokenizer of {model} has been removed")
    tokenizer.decoder.write(runtime / DECODER)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return tokenizer


def _serve(endpoint: ChildEndpoint, tokenizer: Tokenizer) -> None:
    """Answer the coordinator's messages, until one says Shutdown."""
    grammars = Grammars(tokenizer)
    beside, most = _Beside(), resident() + GRAMMAR_MEMORY
    endpoint.wake_by(beside.done)
    while not endpoint.stopped:
        for message in endpoint.receive(wait=True):
            match message:
                case Encode():
                    beside.start(partial(encoded, tokenizer, message))
                case Follow() if message.grammar:
                    while len(grammars) and resident() > most:
                        grammars.drop_largest()
                        give_memory_back()
                    beside.start(partial(grammars.compile, message))
                case Follow():
                    endpoint.send(grammars.follow(message))
                case Unfollow():
                    grammars.drop(message.answer)
                    if not len(grammars):  # no other answer waits for a mask
                        give_memory_back()
        for answer in beside.take():
            endpoint.send(answer)


class _Beside:
    """Jobs that may take long, one at a time, each in a thread: masks are made meanwhile. Its stack is as
    deep as the library goes in any grammar, and is gone with it. `done`: can be read when a job has ended."""

    def __init__(self) -> None:
        threading.stack_size(STACK)
        self.done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._answers: deque[Encoded | Allowed] = deque()

    def start(self, job: Callable[[], Encoded | Allowed]) -> None:
        """Begin a job; the one before has ended."""

        def run() -> None:
            self._answers.append(job())
            os.eventfd_write(self.done, 1)

        threading.Thread(target=run, name="job", daemon=True).start()

    def take(self) -> list[Encoded | Allowed]:
        """Returns the answers of jobs that have ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.done)
        return [self._answers.popleft() for _ in range(len(self._answers))]


def resident() -> int:
    """Returns the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def give_memory_back() -> None:
    """Give what the C library keeps of freed memory back to the system; without glibc it decides itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _close_inherited(lifeline: int) -> None:
    """Close descriptors of the program that started the engine; uvloop passes them on."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != lifeline:
            with suppress(OSError):  # the one that listed the folder
                os.close(int(name))


def _silence_panics() -> None:
    """Drop what the library writes to descriptor 2, past `sys.stderr`: a report of each of its panics, of
    which a text can cause as many as it likes."""
    sys.stderr = visible_stream(os.dup(2))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
