"""Process entry: the tokenizer, which encodes texts and renders conversations for the coordinator.

A chat template is a program and a tokenizer may search with any regular expression: both are the model's, and
on some text they may not end, or fill the memory. In a process of its own they hold up no step of the engine,
and can be killed. It has the model's files, a socket to the coordinator and to the supervisor, and no others.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.errors import ModelError, RequestError
from pipeline.text.grammar import check_grammar
from pipeline.text.guarded import limit_memory
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import Encode, Encoded
from workers.child_endpoint import ChildEndpoint

NICENESS = 5  # of the threads that compute steps, each gets three times as much of a core
MEMORY = 4 << 30  # bytes that one text may take; the longest that a message holds takes 1.2 GB
MOST_IDS = 1 << 22  # of one answer: as many as a message has bytes


def encoded(tokenizer: Tokenizer, asked: Encode) -> Encoded:
    """The answer to an Encode."""
    try:
        if asked.grammar:
            check_grammar(asked.grammar)
        if asked.token_ids is not None:
            text, pieces = tokenizer.decode(asked.token_ids), tokenizer.pieces(asked.token_ids)
            return Encoded(asked.job, np.empty(0, np.int32), text=text, pieces=pieces)
        if asked.messages is not None:
            parts = [tokenizer.render_chat(asked.messages, asked.template)]
        else:
            parts = [tokenizer.encode(text) for text in asked.texts]
        lengths = tuple(map(len, parts))
        if sum(lengths) > MOST_IDS:
            raise RequestError(f"the text has {sum(lengths)} tokens, more than {MOST_IDS}")
        ids = np.fromiter((token for part in parts for token in part), np.int32, sum(lengths))
        return Encoded(asked.job, ids, lengths)
    except RequestError as e:
        reason = str(e)
    except MemoryError:
        reason = "the text takes too much memory to encode"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises any; its panics are no Exception
        reason = f"the model's tokenizer failed: {' '.join(str(e).split())[:200] or type(e).__name__}"
    # A template may name half a character in its refusal.
    return Encoded(asked.job, np.empty(0, np.int32), error=reason.encode(errors="replace").decode())


def main(config: dict[str, Any]) -> int:
    """Run the tokenizer; returns its exit code."""
    os.nice(NICENESS)
    _close_inherited(lifeline=int(sys.argv[-1]))
    endpoint = ChildEndpoint(config, "text.sock")
    try:
        tokenizer = Tokenizer.load(Path(config["model"]))
        if tokenizer is None:
            raise ModelError(f"the tokenizer of {config['model']} has been removed")
        limit_memory(MEMORY)
        _silence_panics()
        endpoint.announce()
        while not endpoint.stopped:
            for message in endpoint.receive(wait=True):
                if isinstance(message, Encode):
                    endpoint.send(encoded(tokenizer, message))
    except ModelError as e:
        endpoint.fail(str(e))
        return 1
    finally:
        endpoint.close()
    return 0


def _close_inherited(lifeline: int) -> None:
    """Descriptors of the program that started the engine; uvloop passes them on."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != lifeline:
            with suppress(OSError):  # the one that listed the folder
                os.close(int(name))


def _silence_panics() -> None:
    """The library writes a report of each of its panics to descriptor 2, past `sys.stderr`; a text can cause
    as many as it likes."""
    # Of the same class, which may filter what is printed.
    stream = io.BufferedWriter(io.FileIO(os.dup(2), "w"))
    sys.stderr = cast(Any, type(sys.stderr))(stream, errors="replace", line_buffering=True)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
