"""Changes an engine's policy, and collects its inputs: costs and the model's calibration. Used by the
engine's thread alone."""

from __future__ import annotations

import logging

from pipeline.calibration.cost_probe import costs_for
from pipeline.calibration.file import calibration_path, load
from pipeline.errors import CalibrationError
from pipeline.memory.limits import full_memory_in_one_line
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Policy, PolicyRequest
from pipeline.serving.device_memory import open_device_memory
from pipeline.serving.engine_parts import EngineParts

log = logging.getLogger(__name__)


class PolicySwitch:
    """Makes policies and gives them their inputs, which are read or measured when a policy is set. `current`:
    the request for the policy in use."""

    def __init__(self, parts: EngineParts) -> None:
        """Sets the configured policy; errors as in `set`."""
        self._parts = parts
        self.costs: Costs | None = None  # None until a policy has needed them
        self._calibration_file = calibration_path(parts.config.cache, parts.source)
        options = parts.config.options
        self.current = PolicyRequest(options.policy or "all-host", options.policy_options)
        parts.notes.extend(self.set(self.current))

    @full_memory_in_one_line()
    def set(self, request: PolicyRequest) -> tuple[str, ...]:
        """Make the policy and use it from the next step on. The first policy that keeps experts on the device
        opens the memory for them. Returns its notes. Raises UsageError, and PeerLost where no prefetcher
        announces itself; the policy in use is kept then."""
        engine = self._parts.engine
        policy: Policy = make_policy(request, self._parts.config.options.seed)
        if policy.uses_device and not engine.memory.exists:
            engine.memory = open_device_memory(self._parts)
        costs, calibration = self._costs_for(policy), self._calibration_for(policy)
        notes = engine.set_policy(policy, costs, calibration)
        self.current = request
        return notes

    def reset(self) -> None:
        """Replace the policy in use by a new object of the same request: without state from earlier steps,
        and with the present inputs."""
        self.set(self.current)

    def _costs_for(self, policy: Policy) -> Costs | None:
        """From a file, from an earlier measurement, or measured now; None for a policy that plans without
        them. Raises PolicyError."""
        if not policy.needs_costs:
            return None
        if self.costs is None:
            self.costs = costs_for(self._parts.engine, self._parts.config, self._parts.context)
        return self.costs

    def _calibration_for(self, policy: Policy) -> Calibration | None:
        """The model's calibration, or None: a policy that does not need it may still use it. Raises
        CalibrationError where the policy needs it and the file is unusable."""
        if not self._calibration_file.exists():
            return None
        try:
            return load(self._calibration_file)
        except CalibrationError as e:
            if policy.needs_calibration:
                raise
            log.warning("%s", e)
            return None
