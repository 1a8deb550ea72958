"""What planning, the store, policies and the KV cache need to know of any model, without torch.

A model of a family of our own is described by its ModelSpec. Any other is described by transformers, which
makes it without memory (`pipeline/generic/describe.py`) in a child process: launch imports neither. The
answer is kept on disk by what it depends on: config, headers, and transformers' version.
"""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.errors import ModelError, UsageError
from pipeline.models.architecture import Architecture, Kind
from pipeline.models.config_keys import Config
from pipeline.models.registry import ARCHITECTURES, model_spec
from pipeline.models.routing import Softmax
from pipeline.models.spec import Latent, ModelSpec
from pipeline.policies.view import Router
from protocol.errors import NotPrivate
from protocol.files import check_private, make_folders, read_small
from protocol.program import user_folder
from shm.atomic_file import atomic_file
from shm.expert_math import ExpertMath, math_of
from shm.layout import ExpertShape, FloeFormat, Part, TileFormat, suitable_tile
from workers.lifetime import PYTHON, environment

MODULE = "pipeline.generic.describe"
LIMIT = 180.0  # seconds of the child; the largest known model takes 15 on one busy core
FOLDER = "facts"  # of the user's cache
FILE_NAME = re.compile(r"[0-9a-f]{32}\.json")
VERSION = 5  # of the files; part of their names
MAX_BYTES = 1 << 22  # of a file
WHOLE_PROMPTS = ("jamba",)  # families whose layers forget, in transformers, what came before several tokens
Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor of a checkpoint, by name


class Group(NamedTuple):
    """Tensors of the backbone of one kind and shape."""

    kind: Kind
    shape: tuple[int, ...]
    number: int


class Table(NamedTuple):
    """An embedding beside that of the input."""

    name: str  # of the module
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A decoder with routed experts."""

    layers: int  # of the decoder
    moe_layers: tuple[int, ...]  # those with routed experts; store, engine and policies count these only
    hidden: int  # H, of an expert's input and output
    intermediate: int  # I of one routed expert
    experts: int  # E a layer
    top_k: int  # k
    math: ExpertMath  # of the routed experts
    vocabulary: int
    max_positions: int
    tied_embeddings: bool  # embeddings and head are one tensor in memory
    kv_streams: tuple[tuple[tuple[int, int], ...], ...]  # by decoder layer, (heads, numbers a token) of each
    state_shapes: tuple[tuple[tuple[int, ...], ...], ...]  # by decoder layer, of its recurrent states
    backbone: tuple[Group, ...]  # every weight but those of routed experts and tables
    rope_switch: int | None = None  # as of ModelSpec's rope
    rope_numbers: int = 0  # of cosines, and of sines, that are kept for a position
    latent: bool = False  # keys and values of attention are expanded from latents
    whole_prompts: bool = False  # a prompt is one chunk, and so is the context
    tables: tuple[Table, ...] = ()  # which stay on disk
    left_aside: str = ""  # a line about parts of the model that are not used
    own_router: Router | None = None
    drafts: bool = False  # as of ModelSpec; the store has that layer's experts behind the others

    @property
    def router(self) -> Router:
        """Of a family of our own its own; else one that stands for it in simulations."""
        return Softmax(self.top_k, rescaled=True) if self.own_router is None else self.own_router

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return sum(heads * width for streams in self.kv_streams for heads, width in streams)

    @property
    def state_numbers(self) -> int:
        """Numbers of a sequence's recurrent states, whatever its length."""
        return sum(math.prod(shape) for layer in self.state_shapes for shape in layer)

    @property
    def matrix_numbers(self) -> int:
        """Numbers of the backbone that may be quantized."""
        return sum(math.prod(g.shape) * g.number for g in self.backbone if g.kind == "matrix")

    @property
    def other_numbers(self) -> int:
        """Numbers of the backbone that are never quantized."""
        return sum(math.prod(g.shape) * g.number for g in self.backbone if g.kind != "matrix")

    @property
    def table_numbers(self) -> int:
        """Numbers of the tables that stay on disk."""
        return sum(math.prod(table.shape) for table in self.tables)

    def decoder_layers(self, layers: range) -> range:
        """The layers of the decoder that belong to these with routed experts: also the dense ones before
        them, and behind the last of all."""
        moe = self.moe_layers
        end = self.layers if layers.stop == len(moe) else moe[layers.stop - 1] + 1
        return range(moe[layers.start - 1] + 1 if layers.start else 0, end)

    @property
    def weights(self) -> int:
        """Numbers of the whole model."""
        expert = self.math.matrices * self.hidden * self.intermediate + self.math.biases * self.intermediate
        beside = self.matrix_numbers + self.other_numbers + self.table_numbers
        return beside + self.stored_layers * self.experts * expert

    @property
    def stored_layers(self) -> int:
        """Layers of the store."""
        return len(self.moe_layers) + self.drafts


def is_own(config: Config) -> bool:
    """Returns whether the model is of a family with a backbone of our own."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in ARCHITECTURES


def facts_of(config: Config) -> ModelFacts:
    """Raises ModelError for a model that cannot be run."""
    if is_own(config):
        return facts_of_spec(ARCHITECTURES[config["model_type"]], model_spec(config))
    return _described(_question(config))


def check_headers(config: Config, headers: Headers) -> str:
    """Raises ModelError where these tensors of a checkpoint are not the model's, as transformers reads them;
    a line about those that are not read."""
    return _described(_question(config, headers=headers)).left_aside


def expert_shape(config: Config, tile: int | None, tile_format: TileFormat) -> ExpertShape:
    """The shape of the routed experts, in tiles of `tile` channels (at most a whole expert) or of a suitable
    number. Raises UsageError where the format has no such tiles."""
    facts = facts_of(config)
    check_kind(facts.math, tile_format)
    group = tile_format.granularity
    if tile is None:
        tile = suitable_tile(facts.hidden, facts.intermediate, tile_format, facts.math)
    elif tile % group:
        raise UsageError(
            f"--tile {tile}: --format {tile_format.name} has tiles of whole groups of {group} channels; "
            f"use a multiple, like {_up(tile, group)}"
        )
    tile = min(tile, _up(facts.intermediate, group))
    return ExpertShape(facts.stored_layers, facts.experts, facts.hidden, facts.intermediate, tile, facts.math)


def narrowed(part: Part, shape: ExpertShape) -> ExpertShape:
    """The shape of a part of experts. Raises UsageError where its lanes are not those of such experts."""
    try:
        return part.narrowed(shape)
    except ValueError as e:
        raise UsageError(f"the machines' lanes do not fit this model in this format: {e}") from None


def check_kind(math: ExpertMath, tile_format: TileFormat) -> None:
    """Raise UsageError for experts without a gate in a format that reads gate channel by channel."""
    if isinstance(tile_format, FloeFormat) and not math.gated:
        raise UsageError(
            f"--format {tile_format.name} streams gate's channels, and this model's experts have no gate "
            f"({math}); use another format, like int4"
        )


def _up(number: int, step: int) -> int:
    """Rounded up to a multiple of `step`."""
    return -(-number // step) * step


def facts_of_spec(architecture: Architecture, spec: ModelSpec) -> ModelFacts:
    """The facts of a model of a family of our own."""
    groups = Counter((tensor.kind, tensor.shape) for tensor in architecture.backbone(spec, fused=False))
    return ModelFacts(
        layers=spec.layers,
        moe_layers=spec.moe_layers,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.experts,
        top_k=spec.top_k,
        math=spec.math,
        vocabulary=spec.vocabulary,
        max_positions=spec.max_positions,
        tied_embeddings=spec.tied_embeddings,
        kv_streams=spec.kv_streams,
        state_shapes=spec.state_shapes,
        backbone=tuple(Group(kind, shape, count) for (kind, shape), count in groups.items()),
        rope_switch=spec.rope_switch,
        rope_numbers=spec.attention.rope_dim * (1 if spec.rope_switch is None else 2),
        latent=isinstance(spec.attention, Latent),
        own_router=spec.router,
        drafts=spec.drafts,
    )


# --- the description by transformers -----------------------------------------------------------------------


def pack(facts: ModelFacts) -> bytes:
    """Returns facts as JSON, for `_unpack`."""
    fields = {name: getattr(facts, name) for name in ModelFacts.__dataclass_fields__}
    return msgspec.json.encode({"facts": fields | {"math": facts.math.plain(), "own_router": None}})


def read(path: Path) -> ModelFacts:
    """Returns the facts in a file of the cache. Raises OSError, NotPrivate, ValueError, KeyError or
    TypeError."""
    return _unpack(read_small(path, MAX_BYTES, check=check_private))


def _unpack(answer: bytes) -> ModelFacts:
    """Raises ValueError, KeyError or TypeError for what `pack` has not made."""
    fields = {name: _tuples(value) for name, value in msgspec.json.decode(answer)["facts"].items()}
    groups = tuple(Group(*group) for group in fields["backbone"])
    tables = tuple(Table(*table) for table in fields["tables"])
    found = {"math": math_of(fields["math"]), "backbone": groups, "tables": tables}
    return ModelFacts(**fields | found)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _question(config: Config, **more: Headers) -> bytes:
    """Returns the question to the child, as JSON. Raises ModelError."""
    try:
        return msgspec.json.encode({"config": config} | more, order="sorted")
    except UnicodeEncodeError:  # halves of surrogate pairs, which JSON may hold as escapes
        raise ModelError("config.json: a text in it is not valid Unicode") from None


@lru_cache(maxsize=8)
def _described(question: bytes) -> ModelFacts:
    """The description of the config in this question, JSON, from disk where it was asked before."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise ModelError(
            "transformers is not installed, and this model needs it: pip install transformers"
        ) from None
    key = hashlib.blake2b(question + f"{VERSION} {installed}".encode(), digest_size=16).hexdigest()
    path = user_folder("CACHE") / FOLDER / f"{key}.json"
    with suppress(OSError, NotPrivate, ValueError, KeyError, TypeError):
        return read(path)
    answer = _ask(question)
    with suppress(OSError):  # without the file the next start asks again
        make_folders(path.parent)
        with atomic_file(path) as file:
            file.write(answer)
    return _unpack(answer)


def _ask(question: bytes) -> bytes:
    """The child's answer. Raises ModelError."""
    try:
        child = subprocess.run(
            [*PYTHON, "-m", MODULE], input=question, capture_output=True, timeout=LIMIT, env=environment(1)
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"config.json: transformers did not describe this model in {LIMIT:.0f} s") from None
    with suppress(msgspec.DecodeError, AttributeError):
        if error := msgspec.json.decode(child.stdout).get("error"):
            raise ModelError(error)
    if child.returncode:
        lines = child.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"exit code {child.returncode}")
        raise ModelError(
            f"config.json: transformers cannot describe this model: {' '.join(reason.split())[:300]}"
        )
    return child.stdout
