"""The bytes of traces: steps are read back, damaged files are refused in one line, and a truncated file ends
with its last complete step."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import FINGERPRINT, drawn_steps, equal, make_header, write_trace

from pipeline.errors import TraceError
from pipeline.models.routing import Scored, Softmax, SparseMixer
from pipeline.policies.view import ModelShape, Router, Routing
from pipeline.traces.trace import (
    FRAME,
    MAGIC,
    PREFIX,
    VERSION,
    Halves,
    Header,
    LayerTrace,
    Trace,
    TracedStep,
    decode_step,
    encode_step,
)

SMALL = make_header(ModelShape(layers=3, experts=5, tiles=2, top_k=2), depth=2)
BEGUN = PREFIX.pack(MAGIC, VERSION, 2)
SOFTMAX = {"kind": "softmax", "k": 2, "rescaled": True, "scale": 1.0, "groups": 1, "best_groups": 1}
SCORED = SOFTMAX | {"kind": "scored", "score": "sigmoid", "group_score": "top2"}


@st.composite
def headers(draw: st.DrawFn) -> Header:
    groups = draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 5))
    k = draw(st.integers(1, experts))
    router: Router = Softmax(
        k, draw(st.booleans()), draw(st.floats(0.1, 9)), groups, draw(st.integers(1, groups))
    )
    if k == 2 and draw(st.booleans()):
        router = SparseMixer(draw(st.floats(0, 1)))
    layers = draw(st.integers(1, 5))
    if draw(st.booleans()):
        bias, scales = (
            draw(st.sampled_from([None, np.full((layers, experts), x, np.float32)])) for x in (-1.5, 2)
        )
        router = Scored(
            "sigmoid", k, draw(st.booleans()), draw(st.floats(0.1, 9)), bias=bias, expert_scale=scales
        )
    shape = ModelShape(layers, experts, draw(st.integers(1, 9)), k)
    depth = draw(st.integers(0, 4))
    return Header(draw(st.text(max_size=9)), FINGERPRINT, FINGERPRINT[::-1], shape, 4096, router, depth)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Header, list[TracedStep]]:
    header = draw(headers())
    shape = header.shape
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def routing(rows: int) -> Routing:
        experts = rng.integers(0, shape.experts, (rows, shape.top_k), np.int32)
        return Routing(experts, rng.normal(size=experts.shape).astype(np.float32))

    def halves(rows: int) -> Halves:
        return rng.normal(size=(rows, shape.experts)).astype("<f2")

    steps = []
    for number in range(draw(st.integers(0, 3))):
        rows = draw(st.integers(1, 4))
        layers = []
        for layer in range(shape.layers):
            own, flags = routing(rows), [draw(st.booleans()) for _ in range(2)]
            layers.append(
                LayerTrace(
                    own,
                    halves(rows) if flags[0] else None,
                    tuple(halves(rows) for _ in range(header.predictions(layer))),
                    halves(rows) if flags[1] and layer == shape.layers - 1 else None,
                )
            )
        sequences = tuple(rng.integers(0, 1 << 32, rows).tolist())
        phase = draw(st.sampled_from(["prefill", "decode"]))
        rest = draw(st.sampled_from([0.0, 1e-6, 0.0123, 20.0]))
        steps.append(TracedStep(number, phase, sequences, tuple(layers), rest))
    return header, steps


@settings(max_examples=60)
@given(traces())
def test_written_steps_are_read_back(tmp_path_factory, made: tuple[Header, list[TracedStep]]) -> None:
    header, steps = made
    trace = Trace(write_trace(tmp_path_factory.mktemp("traces") / "f", header, steps))
    readable = "".join(c if c.isprintable() else "?" for c in header.model)
    assert trace.header == Header(readable, *list(vars(header).values())[1:])
    for wrote, read in zip(steps, trace.steps(), strict=True):
        assert (wrote.number, wrote.phase, wrote.sequences) == (read.number, read.phase, read.sequences)
        assert read.rest == min(wrote.rest, 0xFFFFFF / 1e6)  # microseconds in three bytes
        for a, b in zip(wrote.layers, read.layers, strict=True):
            assert equal(a.router_routing, b.router_routing)
            assert all(map(np.array_equal, a.predictions, b.predictions))
            for one, other in ((a.logits, b.logits), (a.first, b.first)):
                assert (one is None) == (other is None)
                assert one is None or np.array_equal(one, other)
    assert not trace.cut_short


def test_header_restores_an_equal_router(tmp_path: Path) -> None:
    """The same logits give the same experts and weights."""
    bias = np.random.default_rng(1).normal(size=(1, 8)).astype(np.float32)
    biased = Scored("sigmoid", 2, True, 2.5, 4, 2, bias=bias)
    logits = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    for router in (Softmax(2, False, 2.5, 4, 2), Softmax(2, True), SparseMixer(0.01), biased):
        header = make_header(ModelShape(1, 8, 1, 2), router=router)
        assert equal(
            Trace(write_trace(tmp_path / "f", header, [])).header.router(logits, 0), router(logits, 0)
        )


def test_truncated_file_ends_with_its_last_complete_step(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "f", SMALL, drawn_steps(SMALL, 3, 2))
    whole, ends = path.read_bytes(), [len(SMALL.encode())]
    for step in drawn_steps(SMALL, 3, 2):
        ends.append(ends[-1] + len(encode_step(step)))
    assert ends[-1] == len(whole)
    for length in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:length])
        trace = Trace(path)
        steps = sum(end <= length for end in ends) - 1
        assert len(list(trace.steps())) == steps
        assert trace.cut_short == (length not in ends)
        assert trace.end == ends[steps]


@settings(max_examples=150)
@given(st.data())
def test_damaged_file_is_refused_in_one_line(tmp_path_factory, data: st.DataObject) -> None:
    """Any changed byte of a step is detected; a changed header is read or refused."""
    path = write_trace(tmp_path_factory.mktemp("traces") / "f", SMALL, drawn_steps(SMALL, 2, 2))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    refusal, trace, read = "", None, 0
    try:
        trace = Trace(path)
        read = len(list(trace.steps()))
    except TraceError as e:
        refusal = str(e)
    if refusal:
        assert str(path) in refusal
        assert "\n" not in refusal
    else:  # a free text of the header, or a step that would reach beyond the file's end
        assert trace is not None
        assert at < len(SMALL.encode()) or (read < 3 and trace.cut_short)


@settings(max_examples=150)
@given(st.binary(max_size=300), st.booleans())
def test_hostile_bodies_are_refused(body: bytes, begun: bool) -> None:
    """With a valid checksum, too: a body's fields are checked before they are used."""
    if begun:
        body = encode_step(drawn_steps(SMALL, 0, 1)[0])[FRAME.size :][:24] + body
    with pytest.raises(TraceError):
        decode_step(SMALL, body, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": 1 << 40},
        {"experts": True},
        {"top_k": 9},
        {"tiles": "1"},
        {"depth": 99},
        {"model": None},
        {"fingerprint": "../../etc"},
        {"fingerprint": "deadbeef/../../x"},
        {"fingerprint": "ab" * 32 + "\n"},
        {"store": "ABC"},
        {"store": "ab/../x"},
        {"router": None},
        {"router": {"kind": "mean"}},
        {"router": {"kind": ["softmax"]}},
        {"router": {"kind": "softmax", "k": 2}},
        {"router": SOFTMAX | {"k": 3}},
        {"router": SOFTMAX | {"rescaled": 1}},
        {"router": SOFTMAX | {"scale": float("inf")}},
        {"router": SOFTMAX | {"groups": 2}},
        {"router": SOFTMAX | {"best_groups": 2}},
        {"router": {"kind": "sparse-mixer", "jitter": float("nan")}},
        {"router": SOFTMAX | {"arrays": ["bias"]}},
        {"router": SCORED | {"arrays": ["bias"]}},  # which does not follow
        {"router": SCORED | {"arrays": ["scale"]}},
        {"router": SCORED | {"arrays": "bias"}},
        {"router": SCORED | {"bias": [[0] * 5] * 3}},
        {"router": SCORED | {"score": "cosine"}},
        {"router": SCORED | {"groups": 5, "best_groups": 2}},  # groups of one, whose two best are asked for
        {"router": SCORED | {"arrays": ["bias"]}, "layers": 4096, "experts": 65535},
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    plain = json.loads(SMALL.encode()[PREFIX.size :]) | change
    text = json.dumps(plain).encode()
    path = tmp_path / "f"
    path.write_bytes(PREFIX.pack(MAGIC, VERSION, len(text)) + text)
    with pytest.raises(TraceError) as caught:
        Trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a trace"),
        (b"TANDEM", "is not a trace"),
        (b"#!/bin/sh\necho no trace at all", "is not a trace"),
        *((BEGUN[:size], "is not a trace|is incomplete") for size in range(PREFIX.size)),
        (PREFIX.pack(MAGIC, 1, 2) + b"{}", "version 1"),
        (PREFIX.pack(MAGIC, VERSION, 1 << 31), "header is incomplete"),
        (PREFIX.pack(MAGIC, VERSION, 9) + b"{}", "header is incomplete"),
        (PREFIX.pack(MAGIC, VERSION, 2) + b"[]", "damaged"),
        (PREFIX.pack(MAGIC, VERSION, 60000) + b"[" * 60000, "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        Trace(path)


def test_gigabyte_step_is_refused_unread(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "f", SMALL, [])
    with path.open("ab") as file:
        file.write(FRAME.pack(0xFFFFFFFF, 0))
        file.truncate(1 << 33)  # sparse
    with pytest.raises(TraceError, match="4294967295 bytes"):
        list(Trace(path).steps())


def test_step_out_of_order_is_refused(tmp_path: Path) -> None:
    steps = drawn_steps(SMALL, 0, 2)
    path = write_trace(tmp_path / "f", SMALL, [steps[1]])
    with pytest.raises(TraceError, match="step 0 is damaged: it has the number 1"):
        list(Trace(path).steps())


def test_unknown_experts_are_refused(tmp_path: Path) -> None:
    body = bytearray(encode_step(drawn_steps(SMALL, 0, 1)[0])[FRAME.size :])
    body[16 + 4 + 1] = SMALL.shape.experts
    path = tmp_path / "f"
    path.write_bytes(SMALL.encode() + FRAME.pack(len(body), zlib.crc32(body)) + body)
    with pytest.raises(TraceError, match="layer 0 has experts that do not exist"):
        list(Trace(path).steps())


def test_missing_files_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "fifo", Path("nul\0")):
        with pytest.raises(TraceError):
            Trace(path)
