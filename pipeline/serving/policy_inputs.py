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
    """One engine's costs and calibration, read or measured when a policy is set."""

    def __init__(self, config: CoordinatorConfig, source: ModelSource, context: int) -> None:
        """`context`: tokens that a sequence may have."""
        self.costs: Costs | None = None  # None until a policy has needed them
        self._config = config
        self._context = context
        self._calibration_file = calibration_path(config.cache, source)

    def costs_for(self, policy: Policy, engine: Engine) -> Costs | None:
        """From a file, from an earlier measurement, or measured now; None for a policy that plans without
        them. Raises PolicyError."""
        if not policy.needs_costs:
            return None
        if self.costs is None:
            self.costs = costs_for(engine, self._config, self._context)
        return self.costs

    def calibration_for(self, policy: Policy) -> Calibration | None:
        """The model's calibration, where there is one: a policy that does not need it may use it all the
        same. Raises CalibrationError where the policy needs it and the file is unusable."""
        if not self._calibration_file.exists():
            return None
        try:
            return load(self._calibration_file)
        except CalibrationError as e:
            if policy.needs_calibration:
                raise
            log.warning("%s", e)
            return None
