"""What an engine's policies plan with beside its own state: costs and the model's calibration."""

from __future__ import annotations

import logging

from pipeline.calibration.cost_probe import costs_for
from pipeline.calibration.file import calibration_path, load
from pipeline.checkpoint.model_source import ModelSource
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.engine.engine import Engine
from pipeline.errors import CalibrationError
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Policy

log = logging.getLogger(__name__)


class PolicyInputs:
    """Of one engine; looked for when a policy is set."""

    def __init__(self, told: CoordinatorConfig, source: ModelSource, context: int) -> None:
        """`context`: tokens that a sequence may have."""
        self.costs: Costs | None = None  # once a policy has needed them
        self._told = told
        self._context = context
        self._calibration = calibration_path(told.cache, source)

    def costs_for(self, policy: Policy, engine: Engine) -> Costs | None:
        """Given, known from before, or measured now; None for a policy that plans without them. Raises
        PolicyError."""
        if not policy.needs_costs:
            return None
        if self.costs is None:
            self.costs = costs_for(engine, self._told, self._context)
        return self.costs

    def calibration_for(self, policy: Policy) -> Calibration | None:
        """The model's, where it has been calibrated: also a policy that needs none may make use of it. Raises
        CalibrationError where the policy needs one and the file cannot be used."""
        if not self._calibration.exists():
            return None
        try:
            return load(self._calibration)
        except CalibrationError as e:
            if policy.needs_calibration:
                raise
            log.warning("%s", e)
            return None
