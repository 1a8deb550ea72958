"""The contract between the engine and a policy: what a policy sees, and what it answers.

A policy plans with numpy arrays. It does no I/O, holds no tensor and starts no process, so it can be
tested with arrays alone. The engine executes what it answers and decides nothing itself.

Vocabulary (DESIGN.md section 1): an expert has n tiles. Its *residency* r is how many leading tiles are
in device memory; its *cut* p says that in this step the device computes tiles [0, p) and the host
[p, n). Tiles [r, p) are fetched first. A *target* is the residency the policy wants to keep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.costs import Costs

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class ModelShape:
    """What a policy may know of the model."""

    layers: int
    experts: int  # E, a layer
    tiles: int  # n, an expert
    top_k: int  # k, experts a token


@dataclass(frozen=True)
class Routing:
    """Which experts a batch of R rows uses in one layer."""

    experts: IntArray  # [R, k]
    weights: FloatArray  # [R, k]; a weight of 0 computes nothing

    def workload(self, num_experts: int) -> IntArray:
        """Rows routed to each expert, int32 [E]; the active experts are those above 0."""
        used = self.experts[self.weights != 0]
        return np.bincount(used, minlength=num_experts).astype(np.int32)


@dataclass(frozen=True)
class Target:
    """Keep the leading `tiles` tiles of an expert resident from now on (0: evict it)."""

    layer: int
    expert: int
    tiles: int


@dataclass(frozen=True)
class Plan:
    """One layer's step. `cut` [E] int32 in 0..n, read only for active experts. `targets` are applied
    before anything is fetched: those that shrink free their slots at once; a grown target is met by this
    step's own fetches as far as they reach, and by background fetches for the rest."""

    cut: IntArray
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class View:
    """What a policy sees when it is asked. The arrays are read-only."""

    shape: ModelShape
    phase: Phase
    capacity: int  # tiles that the cache may keep resident over all layers
    residency: IntArray  # [L, E]: leading tiles that have landed
    target: IntArray  # [L, E]: leading tiles to keep; sum <= capacity
    popularity: NDArray[np.int64]  # [L, E]: rows routed to each expert since the engine started
    step: int  # engine steps since the policy was set; one step visits every layer once
    costs: Costs | None  # None unless the policy's `needs_costs`


class Policy(ABC):
    """One preset. A new policy object is made at start and at each SetPolicy; it may keep state."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    needs_costs: ClassVar[bool] = False
    uses_device: ClassVar[bool] = True  # False: no slab and no prefetcher are needed

    def notes(self, view: View) -> tuple[str, ...]:
        """What was asked of this policy and cannot be done here, with the reason; each one line."""
        return ()

    @abstractmethod
    def placement(self, view: View) -> IntArray:
        """Targets [L, E] int32 in 0..n at the start, sum <= view.capacity."""

    @abstractmethod
    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        """The step's plan for one layer, once its routing is known. The targets after it must fit the
        capacity."""

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        """Changes of residency once the layer has been computed."""
        return ()


@dataclass(frozen=True)
class PolicyRequest:
    """A preset's name and its options as text, as they come from the command line or SetPolicy."""

    name: str
    options: dict[str, str] = field(default_factory=dict)
