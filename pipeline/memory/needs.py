"""The memory that a model needs in one format, from its config and its file headers alone; and the limits of
its parts: tiles of the cache, tokens of a context and the KV cache, rows of a step.

Exact, but for the processes' private memory: measured on the CPU (torch 2.13), estimated with a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.checkpoint.model_source import ModelSource, OwnMatrix
from pipeline.config import (
    DEFAULT_CONTEXT,
    DRAFT_RECENT,
    DRAFT_SEQUENCES,
    DRAFT_TOKENS,
    EXPANDED_KV_BYTES,
    GRAPH_BYTES,
    KV_BLOCK,
    KV_CONTEXTS,
    KV_RUN,
    SCORE_BYTES,
    SNAPSHOTS,
    STATE_TOKENS,
    BackboneDType,
    EngineConfig,
    FormatName,
    KvDType,
)
from pipeline.device.base import CONTEXT_BYTES, SLOT_ALIGNMENT
from pipeline.errors import UsageError
from pipeline.models.architecture import TensorSpec, stacks
from pipeline.models.config_keys import DRAFTS
from pipeline.models.facts import ModelFacts, expert_shape, facts_of, is_own, narrowed
from pipeline.models.registry import architecture_of, model_spec
from pipeline.policies.view import Policy
from shm.codes import CODE_FORMATS, format_of_all
from shm.fp8 import BLOCK
from shm.layout import FORMATS, FloeFormat, MatrixFormat, TileFormat, format_named
from shm.segment import allocated_bytes, byte_size
from shm.store import StoreManifest, store_bytes, store_name

COORDINATOR = {"cpu": 320_000_000, "cuda": 1_500_000_000}  # bytes; measured: 290 MB. A CUDA context is large
WORKER = 80_000_000  # measured: 70 MB, including a wide step
TOKENIZER = 60_000_000  # measured: 46 MB with a small vocabulary, before its first text
PREFETCHER = {"cpu": 50_000_000, "cuda": 500_000_000}
HIDDEN_COPIES = 8  # float32 hidden states of a step that exist at once, about
MASK_BYTES = 5  # for a row and a token that it may attend to: a bool, and torch's float copy of it
SCORE_COPIES = 4  # of the scores of attention: themselves, masked, their softmax, and that in 16 bits
RECURRENT_COPIES = 8  # of the queries, keys and values of a recurrent layer's rows, about
EXPANDED_COPIES = 4  # of the keys and values that latent attention expands, or of a generic family's scores
STAGING_TILES = 4  # slots beside the cache's: two to stream through, two so that neither side waits
STAGING_SHARE = 1 / 32  # of a GPU's free memory, at most, for more staging slots than the fewest
# Of a partial store, at least: a prompt's layer is computed while the experts of the next are read.
LAYERS_IN_MEMORY = 2
CHUNK_MAX = 1024  # rows of a step, where --chunk does not say otherwise


@dataclass(frozen=True)
class Needs:
    """The needs of one model in one format, in bytes unless noted otherwise."""

    format: FormatName
    backbone_dtype: BackboneDType
    kv_dtype: KvDType
    aside: tuple[str, ...]  # lines about what the model or its files have and is not used
    rounded: str  # how the file has the experts, where this format rounds them a second time; else empty
    rest_rounded: tuple[tuple[str, str], ...]  # the same of the other matrices, and in what they are kept
    store: int  # every expert, or those that are in memory of a partial store
    whole: int  # every expert
    layer: int  # all experts of a layer
    fingerprint: str  # of the store of every expert
    present: int  # of the store, allocated in shared memory already
    heads: int  # of all experts, on a GPU; 0 on the host, which reads them in the store
    slot: int  # a tile on the device, without its head
    tiles: int  # number of tiles of all experts
    staging: int  # slots beside those of the cache, the fewest
    layer_staging: int  # the same where memory allows: on a GPU what a layer demands for one token
    backbone: int
    embedding: int  # of the backbone; of several devices the first has it
    head: int  # which the last one has
    position: int  # cosines and sines of one position
    kv_token: int  # one token of the KV cache
    drafting: int  # what a layer that drafts keeps of sequences
    states: int  # recurrent states of one sequence, with its snapshots
    max_sequences: int  # that run together
    processes: int  # private memory of the processes, on the host
    steps: int  # on a GPU: a step's allocations, CUDA graphs, the second process's context; 0 on the host
    facts: ModelFacts

    @property
    def partial(self) -> bool:
        """Returns whether only some experts are in memory."""
        return self.store < self.whole


def needs(source: ModelSource, config: EngineConfig, format: FormatName) -> Needs:
    """`config`: with its device and its number of workers. Raises UsageError where the format does not have
    the tiles of --tile, ModelError for a model that is not supported."""
    facts, tile_format = facts_of(source.config), format_named(format)
    shape = expert_shape(source.config, config.tile, tile_format)
    fingerprint = source.fingerprint(format, shape.tile)
    part = None if config.lanes is None else config.lanes.part
    if part is not None:
        shape, fingerprint = narrowed(part, shape), part.fingerprint(fingerprint)
    manifest = StoreManifest(fingerprint, shape, format, source.name, part=part)
    whole = store_bytes(manifest)
    partial = config.host_memory is not None and config.host_memory < whole
    store = _budget(config, manifest) if partial else whole
    used = facts
    if facts.drafts and not drafts(config, partial):  # the store has that layer's experts all the same
        used = facts_of({**source.config, DRAFTS: False})
    cuda = config.kind == "cuda"
    slot, heads = manifest.layout.tile_bytes, manifest.layout.head_stride
    staging = staging_tiles(shape.tiles, facts.top_k, heads > 0)
    layers = len(facts.moe_layers)  # a layer that drafts is computed on the host
    tiles = layers * shape.experts * shape.tiles
    rows = min(config.chunk or CHUNK_MAX, config.context or facts.max_positions)
    activations = 4 * rows * (facts.vocabulary + HIDDEN_COPIES * facts.hidden)
    activations += MASK_BYTES * rows * (config.context or min(facts.max_positions, DEFAULT_CONTEXT))
    if cuda and config.backbone_dtype == "f32":  # flash attention is of 16-bit numbers
        activations += SCORE_COPIES * SCORE_BYTES
    if cuda:  # what a row's experts give, each of them, and in 16 bits what is between their matrices
        activations += rows * facts.top_k * (4 * facts.hidden + 2 * facts.intermediate)
    # The widest state is a convolution's, of a number for each of its channels.
    widest = max((max(shape) for states in facts.state_shapes for shape in states), default=0)
    activations += RECURRENT_COPIES * 4 * rows * widest
    if facts.latent or not is_own(source.config):
        activations += EXPANDED_COPIES * EXPANDED_KV_BYTES
    # Each weight is read as float32, whatever its dtype in memory, before activations are allocated.
    largest = 4 * max(math.prod(group.shape) for group in used.backbone)
    device = "cuda" if cuda else "cpu"
    workers = 1 if config.workers is None else config.workers
    processes = COORDINATOR[device] + workers * WORKER + PREFETCHER[device] + TOKENIZER
    processes += 4 * rows * facts.hidden * (workers + 1 if workers else 0)  # the arena
    graphs = GRAPH_BYTES if config.graphs != "off" else 0
    return Needs(
        format=format,
        backbone_dtype=backbone_dtype(source, config),
        kv_dtype=kv_dtype(config),
        aside=tuple(filter(None, (facts.left_aside, source.note))),
        rounded=_rounded(source, format),
        rest_rounded=_rest_rounded(source, facts, config),
        store=store,
        whole=whole,
        layer=manifest.layout.layer_stride,
        fingerprint=fingerprint,
        present=0 if partial else min(store, allocated_bytes(store_name(fingerprint))),
        heads=layers * shape.experts * heads if cuda else 0,
        slot=-(-slot // SLOT_ALIGNMENT) * SLOT_ALIGNMENT if cuda else slot,
        tiles=tiles,
        staging=staging,
        # The host computes each tile as it lands, so more slots would save nothing there.
        layer_staging=layer_staging(shape.tiles, facts.top_k) if cuda and not heads else staging,
        backbone=backbone_bytes(source, used, config),
        embedding=plain_bytes(config) * facts.vocabulary * facts.hidden,
        head=_head_bytes(facts, config),
        position=8 * facts.rope_numbers,
        kv_token=kv_token_bytes(facts, kv_dtype(config)),
        drafting=drafting_bytes(used, config),
        states=state_bytes(facts),
        max_sequences=config.max_sequences,
        processes=processes + (largest if cuda else max(largest, activations)),
        steps=activations + CONTEXT_BYTES + graphs if cuda else 0,
        facts=facts,
    )


def drafts(config: EngineConfig, partial: bool) -> bool:
    """Tells whether a layer that drafts is used where there is one: on one device that has all of a model,
    with experts that are all in this machine's memory, and where something asks for guesses."""
    several = len(config.cards) > 1 or config.lanes is not None or partial
    return config.speculate != "off" and config.record is None and not several


def needs_all(policy: Policy, format: TileFormat) -> str:
    """Tells why a policy cannot be used with experts of this format on disk; empty where it can."""
    if not isinstance(format, FloeFormat) or not policy.uses_device:
        return ""
    return f"policy {policy.name} has the up matrices of all experts on the device: give no --host-memory"


def speed_on_disk(needs: Needs, rate: float) -> float:
    """Tokens a second for which a disk of so many bytes a second can read the experts, where all are used
    evenly."""
    facts = needs.facts
    return rate / ((1 - needs.store / needs.whole) * needs.whole * facts.top_k / facts.experts)


def _budget(config: EngineConfig, manifest: StoreManifest) -> int:
    """Raises UsageError for a budget that is too small, and for what needs every expert in memory."""
    budget, least = config.host_memory or 0, LAYERS_IN_MEMORY * manifest.layout.layer_stride
    if budget < least:
        raise UsageError(
            f"--host-memory {byte_size(budget)}: the experts of two layers must fit, {byte_size(least)} in"
            f" {manifest.format}"
        )
    if config.lanes is not None:
        raise UsageError("--host-memory: experts that are divided among machines are all kept in memory")
    return budget


def plain_bytes(config: EngineConfig) -> int:
    """Bytes of one number of a backbone that is not quantized."""
    return 4 if config.backbone_dtype == "f32" else 2


def kv_dtype(config: EngineConfig) -> KvDType:
    """Returns what is asked for, or what a backbone that is not quantized is in."""
    return config.kv_dtype or ("f32" if config.backbone_dtype == "f32" else "bf16")


def kv_token_bytes(facts: ModelFacts, dtype: KvDType) -> int:
    """Bytes of one token of the KV cache, in int8 with its scales. There is room for whole blocks of
    tokens."""
    streams = [stream for layer in facts.kv_streams for stream in layer]
    if dtype == "int8":
        return sum(heads * (width + 4 * math.ceil(width / KV_RUN)) for heads, width in streams)
    return facts.kv_numbers_per_token * (4 if dtype == "f32" else 2)


def drafting_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    """Bytes of hidden states, and of keys and values of the layer that drafts."""
    if not facts.drafts:
        return 0
    streams = facts.kv_streams[-1:]  # of the last layer, and so of this one
    token = kv_token_bytes(replace(facts, kv_streams=streams), kv_dtype(config))
    hidden = 4 * facts.hidden * (DRAFT_RECENT + CHUNK_MAX)
    return DRAFT_SEQUENCES * (DRAFT_TOKENS * token + hidden) + DRAFT_TOKENS * 8 * facts.rope_numbers


def backbone_dtype(source: ModelSource, config: EngineConfig) -> BackboneDType:
    """Returns what is asked for, or suits the model."""
    return config.backbone_dtype or ("own" if source.own_matrices else "bf16")


def backbone_bytes(source: ModelSource, facts: ModelFacts, config: EngineConfig) -> int:
    """Bytes of the weights on the device."""
    if backbone_dtype(source, config) == "own":
        return _own_bytes(source, facts, config)
    total = quantized = quantized_bytes(facts, config)
    expanding = facts.latent and is_own(source.config)
    for kind, shape, count in facts.backbone:
        if kind == "float32":
            total += 4 * math.prod(shape) * count
        elif kind == "dense" and expanding and shape != (facts.vocabulary, facts.hidden):
            # what expands latents is multiplied by them
            total += (4 if kv_dtype(config) == "f32" else 2) * math.prod(shape) * count
        elif kind != "matrix" or not quantized:
            total += plain_bytes(config) * math.prod(shape) * count
    return total


def _head_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    """Returns the bytes of a head that the file has not quantized."""
    kept = FORMATS.get(config.backbone_dtype or "bf16")
    if isinstance(kept, MatrixFormat):
        return kept.matrix_bytes(facts.vocabulary, facts.hidden)
    return plain_bytes(config) * facts.vocabulary * facts.hidden


def _own_bytes(source: ModelSource, facts: ModelFacts, config: EngineConfig) -> int:
    """With the matrices that the file has quantized as they are there. Those that are kept otherwise all the
    same, for several factors in one matrix, are few."""
    total = backbone_bytes(source, facts, replace(config, backbone_dtype="bf16"))
    table = facts.vocabulary, facts.hidden
    for matrix in own_matrices(source, facts).values():
        total += _matrix_format(matrix).matrix_bytes(*matrix.shape)
        if not (facts.tied_embeddings and matrix.shape == table):  # a plain table cannot serve as the head
            total -= plain_bytes(config) * math.prod(matrix.shape)
    return total


def _rounded(source: ModelSource, format: FormatName) -> str:
    own, stored = source.own_format, source.quantized or source.own_format or ""
    if (own is not None and format_of_all({own, format}) == format) or _is_exact(stored, format):
        return ""
    return stored or ("F16" if source.half and format == "bf16" else "")


def _is_exact(kind: str, dtype: str) -> bool:
    """Returns whether numbers are kept exactly that a file has so."""
    return dtype == "f32" or (dtype == "bf16" and kind in ("MXFP4", "mxfp4"))


def _rest_rounded(
    source: ModelSource, facts: ModelFacts, config: EngineConfig
) -> tuple[tuple[str, str], ...]:
    """How the files have matrices beside the routed experts, with the formats that keep these with a loss: a
    quantized format rounds F16 for the first time, bf16 for the second."""
    dtype = backbone_dtype(source, config)
    plain = "f32" if dtype == "f32" else "bf16"
    own = own_matrices(source, facts) if dtype == "own" else {}
    found: dict[str, set[str]] = {}
    for name, kind in source.kinds.items():
        table = "embed" in name
        dense = "kv_b_proj" in name or (table and not facts.tied_embeddings)
        kept = own[name].format if name in own else plain if dense or dtype == "own" else dtype
        # A table that is the head as well is there twice: as the head, and with rows to read.
        for target in {kept, plain} if table else {kept}:
            first = kind == "F16" and target != "bf16"
            if target not in CODE_FORMATS and not first and not _is_exact(kind, target):
                found.setdefault(target, set()).update(kind.split(", "))
    return tuple((", ".join(sorted(kinds)), target) for target, kinds in sorted(found.items()))


def own_matrices(source: ModelSource, facts: ModelFacts) -> dict[str, OwnMatrix]:
    """Of the matrices that the file has quantized those that a backbone keeps so, each in the format of its
    stack: not an embedding, unless it is the head as well, and none of what is multiplied otherwise or
    small."""
    if not source.own_matrices:
        return {}
    if is_own(source.config):
        spec, architecture = model_spec(source.config), architecture_of(source.config)
        spec = replace(spec, drafts=facts.drafts)
        kept = {t.name for t in architecture.backbone(spec, source.fused) if t.kind == "matrix"}
        if facts.tied_embeddings:
            kept.add(architecture.outer(spec)["embedding"].name)
        own = {name: matrix for name, matrix in source.own_matrices.items() if name in kept}
        for layer in architecture.layers(spec, source.fused):
            _stack(own, layer)
        return own
    table = facts.vocabulary, facts.hidden

    def is_kept(name: str, matrix: OwnMatrix) -> bool:
        if matrix.shape == table and "embed" in name:
            return facts.tied_embeddings
        return "kv_b_proj" not in name

    return {name: matrix for name, matrix in source.own_matrices.items() if is_kept(name, matrix)}


def _stack(own: dict[str, OwnMatrix], layer: dict[str, TensorSpec]) -> None:
    """Give matrices that are stacked the format that keeps all; none where one of them is not quantized."""
    for roles in stacks(layer):
        specs = [layer[role] for role in roles]
        formats = {own[spec.name].format if spec.name in own else "" for spec in specs}
        whole = all(spec.shape[0] % BLOCK == 0 for spec in specs[:-1])  # blocks of fp8
        of_all = format_of_all(formats) if whole or formats != {"fp8"} else None
        for name in (spec.name for spec in specs if spec.name in own):
            if "" in formats:
                del own[name]
            else:
                own[name] = own[name]._replace(format=of_all or "int8")


def backbone_format(source: ModelSource, config: EngineConfig) -> str:
    """The format of most of the backbone's matrices, for measurements."""
    dtype = backbone_dtype(source, config)
    if dtype != "own":
        return dtype
    numbers: Counter[str] = Counter()
    for matrix in source.own_matrices.values():
        numbers[matrix.format] += math.prod(matrix.shape)
    return numbers.most_common(1)[0][0] if numbers else "bf16"


def _matrix_format(matrix: OwnMatrix) -> MatrixFormat:
    found = FORMATS[matrix.format]
    assert isinstance(found, MatrixFormat)
    return found


def quantized_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    """Bytes of the matrices that are all quantized; 0 where they are not. In fp8 those that are stacked share
    blocks, and take a little less."""
    tile_format = FORMATS.get(config.backbone_dtype or "bf16")
    if not isinstance(tile_format, MatrixFormat):
        return 0
    matrices = [group for group in facts.backbone if group.kind == "matrix"]
    total = sum(tile_format.matrix_bytes(*group.shape) * group.number for group in matrices)
    if facts.tied_embeddings:  # a plain table cannot serve as the quantized head
        total += tile_format.matrix_bytes(facts.vocabulary, facts.hidden)
    return total


def staging_tiles(tiles: int, top_k: int, heads: bool) -> int:
    """The fewest slots beside the cache's, for experts of so many tiles, k of them a token. A format with
    `heads` streams channels: there is room for a third of two layers' experts, this one's and the next
    one's."""
    return max(STAGING_TILES, 2 * top_k * math.ceil(tiles / 3) + 2) if heads else STAGING_TILES


def layer_staging(tiles: int, top_k: int) -> int:
    """Slots beside the cache's with which no demanded tile of one token waits for a slot: its experts of a
    layer, and the two tiles that the link may still be copying for orders that were cancelled."""
    return max(STAGING_TILES, top_k * tiles + 2)


def cache_tiles(share: float, tiles: int) -> int:
    """This share of the tiles, rounded down; 0.29 of 100 is 29, though the float product is less."""
    return int(share * tiles + 1e-9)


def choose_context(requested: int | None, facts: ModelFacts, chunk: int | None = None) -> int:
    """Tokens of prompt and answer together. Raises UsageError beyond the model's positions, or beyond a chunk
    of a model that needs its prompts whole."""
    whole = (chunk or CHUNK_MAX) if facts.whole_prompts else facts.max_positions
    if requested is None:
        return min(facts.max_positions, DEFAULT_CONTEXT, whole)
    if requested > facts.max_positions:
        raise UsageError(f"--context {requested} is more than the model's {facts.max_positions} positions")
    if requested > whole:
        raise UsageError(
            f"--context {requested}: this model's prompts are computed whole, so that a context is one chunk"
            f" ({whole} tokens): give --chunk {requested} as well, which takes more memory"
        )
    return requested


def kv_budget(requested: int | None, context: int) -> int:
    """Tokens that the KV cache holds. Raises UsageError for less than one context."""
    if requested is None:
        return KV_CONTEXTS * context
    if requested < context:
        raise UsageError(
            f"--kv-tokens {requested} is less than one context of {context}; lower --context as well"
        )
    return requested


def whole_blocks(tokens: int) -> int:
    """Tokens that as many blocks of the KV cache hold as these need."""
    return -(-tokens // KV_BLOCK) * KV_BLOCK


def state_bytes(facts: ModelFacts) -> int:
    """Of the recurrent states of one sequence: the present and the pending ones, and those of snapshots."""
    return 4 * facts.state_numbers * (2 + SNAPSHOTS)


def kv_sequences(tokens: int, max_sequences: int) -> int:
    """Sequences whose recurrent states a KV cache of so many tokens has room for. One more than run together
    may be needed, because the scheduler reserves a place for another client."""
    return min(-(-tokens // STATE_TOKENS), max_sequences + 1)


@contextlib.contextmanager
def full_memory_in_one_line() -> Iterator[None]:
    """Turn a failed device allocation into a UsageError with the options to change."""
    import torch  # not at the top, because the supervisor plans memory without torch

    try:
        yield
    except torch.OutOfMemoryError as e:
        raise UsageError(out_of_memory(e)) from e


def out_of_memory(error: Exception) -> str:
    """A failed device allocation in one line for a person, with what to change."""
    what = ". ".join(str(error).split(". ")[:2])  # the rest of the message is about torch's allocator
    return f"{what}: use a smaller --expert-cache, --context or --chunk"
