"""A slab's landing flags (`shm/landing_flags.py`) on a GPU's streams: one stream writes them behind its
copies, another waits for them.

They lie in page-locked memory of the host. A stream's operations on memory are documented for that, and not
for memory of another process that is mapped by CUDA IPC; the host reads landings with a plain load, and
releases a waiting stream with a plain store, also while a call of the driver waits for that stream.
"""

from __future__ import annotations

import time
from typing import Any

from shm.landing_flags import FLAG, LandingFlags, next_number
from workers.cuda import CudaError, call, constant, driver_call, passed

TRIAL_LIMIT = 5.0  # seconds for a stream's write and wait


class DeviceFlags:
    """Flags that are page-locked in this process."""

    def __init__(self, flags: LandingFlags, device: int, spare: int) -> None:
        """Page-locks them, and tries a write and a wait with the spare flag of this number. Raises CudaError
        where the driver, or the device, cannot do either."""
        self.flags = flags
        self._start = flags.array.ctypes.data
        call("cudaSetDevice", device)
        kinds = constant("cudaHostRegisterMapped") | constant("cudaHostRegisterPortable")
        call("cudaHostRegister", self._start, flags.array.nbytes, kinds)
        try:
            self._device_address = int(call("cudaHostGetDevicePointer", self._start, 0))
            self._try(flags.slots + spare)
        except BaseException:
            call("cudaHostUnregister", self._start)
            raise

    def _try(self, slot: int) -> None:
        """A stream writes two numbers and waits for the second one."""
        stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        done = call("cudaEventCreateWithFlags", constant("cudaEventDisableTiming"))
        first = next_number(int(self.flags.array[slot]))
        number = next_number(first)
        try:
            self.write(stream, slot, first)
            self.write(stream, slot, number)
            self.wait(stream, slot, number)
            call("cudaEventRecord", done, stream)
            until = time.monotonic() + TRIAL_LIMIT
            while not (passed(done) and self.flags.landed(slot, number)):
                if time.monotonic() > until:
                    raise CudaError(f"a stream has not waited for what it wrote in {TRIAL_LIMIT:.0f} s")
                time.sleep(1e-3)
        finally:
            self.flags.array[slot] = number  # the stream must not be left waiting
            call("cudaStreamSynchronize", stream)
            call("cudaEventDestroy", done)
            call("cudaStreamDestroy", stream)

    def write(self, stream: Any, slot: int, number: int) -> None:
        """Behind all that the stream does so far, with its effects visible: the slot's flag is the number."""
        driver_call("cuStreamWriteValue32", int(stream), self._device_address + slot * FLAG, number, 0)

    def wait(self, stream: Any, slot: int, number: int) -> None:
        """What the stream does from now on waits until the slot's flag has reached the number: the default
        condition is greater or equal in the cycle."""
        driver_call("cuStreamWaitValue32", int(stream), self._device_address + slot * FLAG, number, 0)

    def close(self) -> None:
        """No stream may use them any more. The flags stay open."""
        call("cudaHostUnregister", self._start)
