"""What a step that fails for lack of memory leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput
from pipeline.errors import OutOfDeviceMemory
from pipeline.memory.limits import out_of_memory

P = ParamSpec("P")


Step = Callable[Concatenate[Any, Sequence[StepInput], P], list[FloatArray]]


def restoring_sequences(step: Step[P]) -> Step[P]:
    """A step that, where the device's memory does not suffice for it, makes its sequences as they were and
    raises OutOfDeviceMemory."""

    @wraps(step)
    def restoring(
        engine: Any, inputs: Sequence[StepInput], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[FloatArray]:
        lengths = [item.span.kv.length for item in inputs]
        try:
            return step(engine, inputs, *args, **kwargs)
        except torch.OutOfMemoryError as e:
            for item, length in zip(inputs, lengths, strict=True):
                item.span.kv.truncate(length)
            engine.device.free_cached()
            raise OutOfDeviceMemory(out_of_memory(e)) from e

    return restoring
