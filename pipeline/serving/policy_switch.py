"""Changes an engine's policy, and collects its inputs. Used by the engine's thread alone."""

from __future__ import annotations

import logging

from pipeline.calibration.cost_probe import costs_for
from pipeline.calibration.file import calibration_path, load
from pipeline.errors import CalibrationError
from pipeline.memory.limits import full_memory_in_one_line
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import canonical, make_policy
from pipeline.policies.view import Policy, PolicyRequest
from pipeline.serving.device_memory import DeviceMemoryOpener
from pipeline.serving.engine_parts import EngineParts

log = logging.getLogger(__name__)


class PolicySwitch:
    """Gives policies their costs and calibration. `current`: the request for the policy in use."""

    def __init__(self, parts: EngineParts) -> None:
        """Sets the configured policy; errors as in `set`."""
        self._parts, self._opener = parts, DeviceMemoryOpener(parts)
        self.costs: Costs | None = None  # None until a policy has needed them
        self._calibration_file = calibration_path(parts.config.cache, parts.source)
        options = parts.config.options
        self.current = PolicyRequest(options.policy or "all-host", options.policy_options)
        parts.notes.extend(self.set(self.current))

    @full_memory_in_one_line()
    def set(self, request: PolicyRequest, counted: bool = True) -> tuple[str, ...]:
        """Use this policy from the next step on; the first that keeps experts on the device opens the memory
        for them. Without `counted` the routing of its steps is not counted. Returns notes. Raises UsageError,
        ShmError, CudaError or PrefetcherLost; the policy in use is kept then. Raises PeerLost where the
        engine cannot go on."""
        engine = self._parts.engine
        policy: Policy = make_policy(request, self._parts.config.options.seed)
        if policy.uses_device and not engine.memory.exists:
            engine.memory = self._opener.open()
        costs, calibration = self._costs_for(policy), self._calibration_for(policy)
        follow = self._parts.config.options.costs is None  # those of a file are meant as they are
        notes = engine.set_policy(policy, costs, calibration, counted=counted, follow=follow)
        self.current, self._counted = canonical(request, self._parts.config.options.seed), counted
        return notes

    @property
    def calibrated(self) -> bool:
        """Whether the model has a calibration on this machine."""
        return self._calibration_file.exists()

    def reset(self) -> None:
        """Make the policy in use anew: without state of earlier steps, with the present inputs."""
        self.set(self.current, self._counted)

    def _costs_for(self, policy: Policy) -> Costs | None:
        """From a file, or measured now or earlier; None if not needed. Raises PolicyError."""
        if not policy.needs_costs:
            return None
        if self.costs is None:
            self.costs = costs_for(self._parts.engine, self._parts.config, self._parts.context)
        return self.costs

    def _calibration_for(self, policy: Policy) -> Calibration | None:
        """None without a usable file. Raises CalibrationError where the policy needs it."""
        if not self.calibrated:
            return None
        try:
            return load(self._calibration_file)
        except CalibrationError as e:
            if policy.needs_calibration:
                raise
            log.warning("%s", e)
            return None
