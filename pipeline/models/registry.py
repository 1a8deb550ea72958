"""From a config.json to its architecture, and to the shape of its experts."""

from __future__ import annotations

from pipeline.errors import ModelError
from pipeline.models.mixtral import Mixtral
from pipeline.models.spec import Architecture, Config, ModelSpec
from shm.layout import ExpertShape

ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (Mixtral(),)}

# A tile should be large enough that starting its kernel or its copy costs little, small enough that one
# expert can be shared by all cores and computed while the rest of it is still being copied.
TILE_BYTES = 1 << 20  # at least, counted in bf16
TILES_PER_EXPERT = 16  # at most


def architecture_of(config: Config) -> Architecture:
    """Raises ModelError for an architecture without a class."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config.json: architecture {kind!r} is not supported; there is {known}")
    return ARCHITECTURES[kind]


def model_spec(config: Config) -> ModelSpec:
    """Raises ModelError for an unknown architecture or a variant that is not supported."""
    spec = architecture_of(config).spec(config)
    if spec.top_k > spec.experts:
        raise ModelError(f"config.json: {spec.top_k} experts a token, but only {spec.experts} a layer")
    if spec.heads % spec.kv_heads or spec.head_dim % 2:
        raise ModelError(
            f"config.json: {spec.heads} heads cannot share {spec.kv_heads} key/value heads"
            f" of {spec.head_dim} numbers"
        )
    return spec


def expert_shape(config: Config, tile: int | None) -> ExpertShape:
    """The routed experts in tiles of `tile` channels, or of a size that suits them."""
    spec = model_spec(config)
    if tile is None:
        enough = -(-TILE_BYTES // (6 * spec.hidden))
        share = -(-spec.intermediate // TILES_PER_EXPERT)
        tile = -(-max(enough, share) // 32) * 32
    tile = min(tile, spec.intermediate)
    return ExpertShape(spec.layers, spec.experts, spec.hidden, spec.intermediate, tile)


def expert_tensors(config: Config, layer: int, expert: int) -> tuple[str, str, str]:
    """Checkpoint names of one expert's gate [I, H], up [I, H] and down [H, I]."""
    return architecture_of(config).expert_names(layer, expert)
