"""Random decoder layers: their weights, their result in C, and the formula in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from attention_cases import (
    EPS,
    Paged,
    as_cached,
    by_stream,
    grouped_inputs,
    multiplied,
    normed,
    numbers,
    opened,
    read,
    softmax,
    stored,
    tables,
    tables_of,
    turned,
)
from decoding import decode_matrix
from hypothesis import strategies as st

from shm.formats import MatrixFormat
from shm.layout import format_named
from workers.kernels.c_types import Kept
from workers.kernels.layer import (
    KV_BLOCK,
    QK_NORMS,
    TOKEN,
    Grouped,
    Latent,
    LayerKernel,
    LayerParts,
    NormOf,
    Projection,
    Tokens,
)
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.native import Library, Team


@dataclass(frozen=True)
class Shape:
    """A layer. `latent`: rank, nope, value and, unless 0, the queries' rank."""

    hidden: int
    heads: int
    kv_heads: int
    half: int  # of the numbers that are rotated
    still: int = 0  # numbers of a head that are not; as `gates`, of grouped attention
    gates: bool = False
    latent: tuple[int, int, int, int] | None = None
    norm: str = ""  # one of QK_NORMS
    clip: float | None = None
    window: int | None = None
    sinks: bool = False
    biases: bool = False
    layer_norm: bool = False
    experts: int = 0  # 0: a dense layer
    channels: int = 0  # of the block for every row; 0: none
    gated: bool = False
    format: str = "f32"  # of the matrices
    bits: int = 32  # of a cached number

    @property
    def width(self) -> int:
        """Of a head of grouped attention."""
        return 2 * self.half + self.still

    @property
    def streams(self) -> list[tuple[int, int]]:
        if self.latent is not None:
            return [(1, self.latent[0] + 2 * self.half)]
        return [(self.kv_heads, self.width)] * 2


@dataclass
class Layer:
    """A random layer of a shape. Matrices hold the numbers that their format keeps."""

    shape: Shape
    random: np.random.Generator
    plain: dict[str, np.ndarray] = field(default_factory=dict)
    data: dict[str, np.ndarray] = field(default_factory=dict)  # matrices in their format
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        for name in ("attention_norm", "mlp_norm"):
            self.vector(name, s.hidden)
            if s.layer_norm:
                self.vector(f"{name}_bias", s.hidden)
        if s.latent is None:
            self.matrix("first", ((1 + s.gates) * s.heads + 2 * s.kv_heads) * s.width, s.hidden)
            self.matrix("output", s.hidden, s.heads * s.width)
            all_heads = 1 if s.norm == "head" else s.heads
            self.vector("query_norm", all_heads * s.width)
            self.vector("key_norm", (1 if s.norm == "head" else s.kv_heads) * s.width)
            if s.sinks:
                self.vector("sinks", s.heads)
        else:
            rank, nope, value, query_rank = s.latent
            queries = s.heads * (nope + 2 * s.half)
            self.matrix("first", (query_rank or queries) + rank + 2 * s.half, s.hidden)
            if query_rank:
                self.matrix("query", queries, query_rank)
            self.matrix("output", s.hidden, s.heads * value)
            self.vector("query_norm", query_rank)
            self.vector("norm", rank)
            expansion = numbers(self.random, s.heads, nope + value, rank) * np.float32(rank**-0.5)
            self.data["expansion"] = as_cached(expansion, max(s.bits, 16))
            self.plain["expansion"] = read(self.data["expansion"])
        if s.experts:
            self.plain["router"] = numbers(self.random, s.experts, s.hidden)
            if s.biases:
                self.vector("router_bias", s.experts)
        if s.channels or not s.experts:
            self.matrix("up", 2 * s.channels, s.hidden)
            self.matrix("down", s.hidden, s.channels)
        if s.gated:
            self.vector("gate", s.hidden)

    def vector(self, name: str, size: int) -> None:
        self.plain[name] = numbers(self.random, size)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        w = numbers(self.random, outputs, inputs) * np.float32(inputs**-0.5)
        format = format_named(self.shape.format)
        if isinstance(format, MatrixFormat):
            self.data[name] = quantized(format, w)
            self.plain[name] = decode_matrix(format, self.data[name], outputs, inputs).astype(np.float64)
        else:
            self.data[name] = as_cached(w, 32 if self.shape.format == "f32" else 16)
            self.plain[name] = read(self.data[name])
        self.sizes[name] = outputs, inputs
        if self.shape.biases:
            self.vector(f"{name}_bias", outputs)

    def address(self, name: str) -> int | None:
        array = self.data.get(name, self.plain.get(name))
        return None if array is None or not array.size else array.ctypes.data

    def kernel(self, library: Library, team: Team | None) -> LayerKernel:
        s = self.shape
        format = format_named(s.format)

        def projection(name: str) -> Projection | None:
            if name not in self.data:
                return None
            data = self.data[name].view(np.uint8).reshape(-1)
            matrix = HostMatrix(library, team, format, self.sizes[name], data)
            return Projection(matrix, self.address(f"{name}_bias"))

        attention: Grouped | Latent
        norms = self.address("query_norm"), self.address("key_norm")
        if s.latent is None:
            sizes = s.heads, s.kv_heads, s.width, 2 * s.half, s.gates
            options = s.window or 0, QK_NORMS.index(s.norm)
            sinks = self.address("sinks")
            attention = Grouped(s.bits, *sizes, *options, *norms, sinks, EPS, s.clip or 0, s.width**-0.5)
        else:
            rank, nope, value, query_rank = s.latent
            rope = 2 * s.half
            weights = norms[0], self.address("norm"), self.address("expansion")
            sizes = s.heads, rank, nope, rope, value, query_rank
            attention = Latent(s.bits, *sizes, *weights, EPS, (nope + rope) ** -0.5)
        first, output = projection("first"), projection("output")
        assert first is not None
        assert output is not None
        parts = LayerParts(
            hidden=s.hidden,
            experts=s.experts,
            attention_norm=self.norm("attention_norm"),
            mlp_norm=self.norm("mlp_norm"),
            attention=attention,
            first=first,
            query=projection("query"),
            output=output,
            router=self.address("router"),
            router_bias=self.address("router_bias"),
            up=projection("up"),
            down=projection("down"),
            gate=self.address("gate"),
        )
        return LayerKernel(library, team, 1, parts, Kept())

    def norm(self, name: str) -> NormOf:
        return NormOf(self.address(name), self.address(f"{name}_bias"), EPS)


@dataclass
class Rows:
    """Single tokens of sequences of these lengths, with caches of two layers; the layer is the second."""

    layer: Layer
    positions: list[int]
    spare: int = 3  # tokens beyond the position

    def __post_init__(self) -> None:
        s, random = self.layer.shape, self.layer.random
        self.h = numbers(random, len(self.positions), s.hidden)
        self.angles = random.uniform(0, 6, (len(self.positions), s.half))
        self.caches = [
            [
                part
                for heads, width in 2 * s.streams
                for part in stored(numbers(random, heads, p + self.spare, width), s.bits)
            ]
            for p in self.positions
        ]
        self.tables = tables_of(random, [p + self.spare for p in self.positions])

    def compute(self, kernel: LayerKernel, rows: list[int], logits: bool = True) -> dict[str, np.ndarray]:
        """Of some rows, in this order, from fresh copies of their caches."""
        s = self.layer.shape
        slabs = [Paged.of(list(of_rows), self.tables) for of_rows in zip(*self.caches, strict=True)]
        addresses = np.array([paged.slab.ctypes.data for paged in slabs], np.uint64)
        turns = np.ascontiguousarray(np.stack([tables(each) for each in self.angles[rows]], axis=1))
        tokens = np.zeros(len(rows), TOKEN)
        for i, row in enumerate(rows):
            tokens[i] = (
                turns[0, i].ctypes.data,
                turns[1, i].ctypes.data,
                addresses.ctypes.data,
                self.tables[row].ctypes.data,
                0,
                len(self.tables[row]) * KV_BLOCK,
                self.positions[row],
            )
        h = self.h[rows]
        shapes = {"out": s.hidden, "x": s.hidden, "logits": s.experts, "shared": s.hidden}
        found = {name: np.full((len(rows), n), np.nan, np.float32) for name, n in shapes.items()}
        addresses_of = {name: array.ctypes.data for name, array in found.items()}
        if not logits:
            addresses_of["logits"] = None  # type: ignore[assignment]
        try:
            kernel(Tokens(tokens), h.ctypes.data, **addresses_of)
        except IndexError:
            for paged, of_rows in zip(slabs, zip(*self.caches, strict=True), strict=True):
                assert np.array_equal(paged.slab, Paged.of(list(of_rows), self.tables).slab)
            raise
        assert np.array_equal(h, self.h[rows])
        caches = [paged.caches() for paged in slabs]
        return found | {
            f"cache {n}": _each([of_rows[row] for row in rows]) for n, of_rows in enumerate(caches)
        }

    def expected(self, row: int, caches: list[np.ndarray]) -> dict[str, np.ndarray]:
        """The formula in float64, in the order of definition: latents are expanded for every token. `caches`:
        of the layer, with the row's own token as it was rounded; `stored` is what that should be."""
        s, w = self.layer.shape, self.layer.plain

        def product(name: str, x: np.ndarray) -> np.ndarray:
            return w[name] @ x + w.get(f"{name}_bias", 0)

        h = self.h[row].astype(np.float64)
        first = product("first", normed(h, w["attention_norm"], w.get("attention_norm_bias")))
        attended, stored = (self._grouped if s.latent is None else self._latent)(row, first, product, caches)
        h = h + product("output", attended.ravel())
        x = normed(h, w["mlp_norm"], w.get("mlp_norm_bias"))
        found = {"x": x, "stored": stored}
        if s.experts:
            found["logits"] = product("router", x)
        if "up" in w:
            gate, up = np.split(product("up", x), 2)
            y = product("down", gate / (1 + np.exp(-gate)) * up)
            if s.gated:
                y = y / (1 + np.exp(-(w["gate"] @ x)))
            if s.experts:
                found["shared"] = y
            else:
                h = h + y
        return found | {"out": h}

    def _grouped(self, row: int, first, product, caches) -> tuple[np.ndarray, list[np.ndarray]]:
        s, w, position = self.layer.shape, self.layer.plain, self.positions[row]
        weights = [w["query_norm"], w["key_norm"]]
        x = first.reshape(-1, s.width)
        gates, x = np.split(x, [s.heads * s.gates])
        q, k, v = grouped_inputs(x, self.angles[row], s.kv_heads, s.norm, weights, s.clip)
        keys, values = by_stream(caches, s.bits)
        q = multiplied(q, s.bits)
        seen = slice(0 if s.window is None else max(0, position + 1 - s.window), position + 1)
        shared, scale = s.heads // s.kv_heads, s.width**-0.5
        sinks = w["sinks"] if s.sinks else [None] * s.heads
        heads = [
            softmax(keys[i // shared, seen] @ q[i] * scale, sinks[i]) @ values[i // shared, seen]
            for i in range(s.heads)
        ]
        return opened(np.array(heads), gates) if s.gates else np.array(heads), [k, v]

    def _latent(self, row: int, first, product, caches) -> tuple[np.ndarray, list[np.ndarray]]:
        s, w, position = self.layer.shape, self.layer.plain, self.positions[row]
        assert s.latent is not None
        rank, nope, _, query_rank = s.latent
        width, angles = rank + 2 * s.half, self.angles[row]
        q, new = first[:-width], first[-width:]
        if query_rank:
            q = product("query", normed(q, w["query_norm"]))
        q = q.reshape(s.heads, -1)
        new = np.concatenate((normed(new[:rank], w["norm"]), turned(new[rank:], angles)))
        cached = by_stream(caches, s.bits)[0][0, : position + 1]
        heads = []
        for head in range(s.heads):
            both = cached[:, :rank] @ w["expansion"][head].T
            keys = np.concatenate((both[:, :nope], cached[:, rank:]), axis=1)
            query = np.concatenate((q[head, :nope], turned(q[head, nope:], angles)))
            heads.append(softmax(keys @ query * len(query) ** -0.5) @ both[:, nope:])
        return np.array(heads), [new]


def _each(arrays: list[np.ndarray]) -> np.ndarray:
    """An array of arrays."""
    found = np.empty(len(arrays), object)
    for i, array in enumerate(arrays):
        found[i] = array
    return found


@st.composite
def shapes(draw: st.DrawFn, formats: tuple[str, ...] = ("f32",)) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    experts = draw(st.sampled_from([0, 1, 5, 17]))
    channels = draw(st.integers(1, 70)) if not experts else draw(st.sampled_from([0, 3, 40]))
    latent = None
    if draw(st.booleans()):
        sizes = st.integers(1, 150), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 0, 7, 64])
        latent = draw(st.tuples(*sizes))
    return Shape(
        hidden=draw(st.integers(16, 150)),  # a norm over fewer makes any rounding large where all are near 0
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        half=draw(st.integers(1, 40)),
        still=draw(st.sampled_from([0, 0, 1, 40])),
        gates=draw(st.booleans()),
        latent=latent,
        norm=draw(st.sampled_from(QK_NORMS)),
        clip=draw(st.none() | st.floats(0.1, 2.0)),
        window=draw(st.none() | st.integers(1, 50)),
        sinks=draw(st.booleans()),
        biases=draw(st.booleans()),
        layer_norm=draw(st.booleans()),
        experts=experts,
        channels=channels,
        gated=bool(experts and channels) and draw(st.booleans()),
        format=draw(st.sampled_from(formats)),
        bits=draw(st.sampled_from([8, 16, 32])),
    )
