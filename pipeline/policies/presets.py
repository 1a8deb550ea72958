"""The table of presets: adding a policy is adding a class and its row here."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.errors import PolicyError
from pipeline.policies.lru import OnDemand
from pipeline.policies.options import Preset, did_you_mean, parse_options
from pipeline.policies.random_plan import RandomPlan
from pipeline.policies.static import AllHost, Fiddler, Layerwise
from pipeline.policies.view import Policy, PolicyRequest

PRESETS: dict[str, type[Preset]] = {
    preset.name: preset
    for preset in (
        AllHost,
        OnDemand,
        Layerwise,
        Fiddler,
        RandomPlan,
    )
}


def make_policy(request: PolicyRequest, seed: int) -> Policy:
    """A new policy object. `seed` is the engine's, for options that are not given one.

    Raises PolicyError, one line with the nearest names, for an unknown preset, option or value.
    """
    preset = PRESETS.get(request.name)
    if preset is None:
        raise PolicyError(
            f"unknown policy {request.name[:40]!r}{did_you_mean(request.name, PRESETS)} "
            f"(there are {', '.join(PRESETS)})"
        )
    build: Callable[..., Policy] = preset
    return build(**parse_options(preset, request.options, seed))
