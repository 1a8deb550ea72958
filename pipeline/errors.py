"""Errors of the engine, each with when it is raised."""


class PipelineError(Exception):
    """Base of this package's errors; its text is one line for a person."""


class UsageError(PipelineError):
    """The user's input is at fault: exit code 2, or an Error message on the wire."""


class ModelError(UsageError):
    """A model directory is missing, incomplete, damaged, or of an architecture that is not supported."""


class PolicyError(UsageError):
    """An unknown policy, option or option value; the text gives the nearest names."""


class CalibrationError(UsageError):
    """A calibration's file is missing, damaged, another model's or of another version."""


class RequestError(UsageError):
    """A request that cannot be served: over the context limit, ids outside the vocabulary, and so on."""


class TraceError(UsageError):
    """A file of `--record` cannot be written, or one for `--replay` cannot be read: no trace, damaged, or of
    another version."""


class PlanError(PipelineError):
    """A policy's answer breaks its contract: a bug in the policy, never the user's fault."""


class PeerLost(PipelineError):
    """The engine waited for a worker or the prefetcher in vain: it did not come, or all were given up."""


class ShardFailed(PipelineError):
    """A run of a step cannot be computed: it crashed the workers that tried, or a worker refused it. The
    requests whose rows it has are at fault, or the experts' bytes; the workers are replaced."""


class NumberInUse(RequestError):
    """A request came with the number of one that is being served."""
