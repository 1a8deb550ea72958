"""Errors of the engine, each with when it is raised."""


class PipelineError(Exception):
    """Base of this package's errors; its text is one line for a person."""


class UsageError(PipelineError):
    """The user's input is at fault: exit code 2, or an Error message on the wire."""


class NoRoom(UsageError):
    """An engine's slab, KV cache or weights do not fit the device's free memory."""


class ModelError(UsageError):
    """A model directory is missing, incomplete, damaged, or of an architecture that is not supported."""


class PolicyError(UsageError):
    """An unknown policy, option or option value; the text gives the nearest names."""


class CalibrationError(UsageError):
    """A calibration's file is missing, damaged, another model's or of another version."""


class RequestError(UsageError):
    """A request that cannot be served: over the context limit, ids outside the vocabulary, and so on."""


class PromptTooLong(RequestError):
    """A prompt leaves less of the context for its answer than the request reserves. `tokens`: of the prompt,
    or a lower bound beyond the context."""

    def __init__(self, text: str, tokens: int) -> None:
        super().__init__(text)
        self.tokens = tokens


class TraceError(UsageError):
    """A trace file cannot be written, or read: not a trace, damaged, or of another version."""


class PlanError(PipelineError):
    """A policy's plan breaks its contract: a bug in the policy, never the user's fault."""


class PeerLost(PipelineError):
    """A worker or the prefetcher did not announce itself or answer in time, or waits were given up."""


class PrefetcherLost(PeerLost):
    """No prefetcher was ready in time. A later attempt may find one."""


class StepFailed(PipelineError):
    """A step could not be computed because of one of its requests. Others go on."""

    begins_again = False  # none of its requests is at fault


class OutOfDeviceMemory(StepFailed):
    """An allocation on the device failed in a step, or of a sequence's KV."""


class DeviceFailed(StepFailed):
    """A call of the device failed in a step, and later ones do not."""


class ShardFailed(StepFailed):
    """A Work of a step cannot be computed: it crashed the workers that tried, or a worker refused it. The
    cause is a request with rows in the Work, or the experts' bytes; the workers are restarted."""


class StepInterrupted(StepFailed):
    """A step waited for a lost machine when a message of a client came, which is heard first."""

    begins_again = True


class DiskFailed(StepFailed):
    """An expert, or a row of a table, that a step needs could not be read from its file."""


class NotFinite(PipelineError):
    """A request's logits hold NaN or no finite maximum: its KV may be wrong."""


class NumberInUse(RequestError):
    """A client reuses the number of its own request that is being served."""


DOUBTFUL = NotFinite, ShardFailed  # after these the KV of a request may be wrong
