"""Changes an engine's policy. Used by the engine's thread alone."""

from __future__ import annotations

from pipeline.memory.limits import full_memory_in_one_line
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Policy, PolicyRequest
from pipeline.serving.device_memory import open_device_memory
from pipeline.serving.engine_builder import EngineParts
from pipeline.serving.policy_inputs import PolicyInputs


class PolicySwitch:
    """Makes policies and gives them what they plan with. `current`: the policy in use, as it was
    requested."""

    def __init__(self, parts: EngineParts) -> None:
        """Sets the configured policy; errors as in `set`."""
        self._parts = parts
        self.inputs = PolicyInputs(parts.config, parts.source, parts.context)
        options = parts.config.options
        self.current = PolicyRequest(options.policy or "all-host", options.policy_options)
        parts.notes.extend(self.set(self.current))

    @full_memory_in_one_line()
    def set(self, request: PolicyRequest) -> tuple[str, ...]:
        """Make the policy and use it from the next step on. The first policy that keeps experts on the device
        opens the memory for them. Returns its notes. Raises UsageError, and PeerLost where no prefetcher
        announces itself; the policy in use is then kept."""
        engine = self._parts.engine
        policy: Policy = make_policy(request, self._parts.config.options.seed)
        if policy.uses_device and engine.memory is None:
            engine.memory = open_device_memory(self._parts)
        costs = self.inputs.costs_for(policy, engine)
        notes = engine.set_policy(policy, costs, self.inputs.calibration_for(policy))
        self.current = request
        return notes

    def reset(self) -> None:
        """Make the policy in use anew: it has learnt nothing from earlier steps, and plans with what is known
        now."""
        self.set(self.current)
