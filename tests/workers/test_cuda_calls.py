"""Tests of the CUDA calls that need no GPU; the others are in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
from child_harness import small_store, surroundings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import AttachSlab, SlabAttached
from workers import cuda


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_copies_are_cut_at_page_locking_boundaries(data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 50))
    memory = np.zeros(data.draw(st.integers(1, 300)), np.uint8)
    offset = data.draw(st.integers(0, memory.nbytes - 1))
    size = data.draw(st.integers(1, memory.nbytes - offset))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "REGISTER_CHUNK", chunk)
        parts = list(cuda.registered_parts(memory, memory.ctypes.data + offset, size))
    assert [lo for lo, _ in parts] == [0, *(hi for _, hi in parts[:-1])]  # all of it, in order
    assert parts[-1][1] == size
    for lo, hi in parts:
        assert lo < hi
        assert (offset + lo) // chunk == (offset + hi - 1) // chunk  # within one registration


@pytest.mark.parametrize("size", [0, 63, 65])
def test_an_ipc_handle_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(cuda.CudaError, match=f"64 bytes, not {size}"):
        cuda.open_ipc_handle(0, bytes(size))


def test_prefetcher_that_cannot_map_a_gpu_slab_answers_with_the_reason_and_stays() -> None:
    """Without a GPU or cuda-bindings, and with both because this handle is none. Nothing is prefetched then;
    exiting would only have it restarted."""
    with small_store() as fingerprint, surroundings("prefetcher", fingerprint) as place:
        child = place.start()
        place.ready()
        place.send(child, AttachSlab("cuda", bytes(64), 0, 1, 256))
        answer = place.expect(SlabAttached)
        assert "cuda" in answer.error.lower()
        assert "\n" not in answer.error
        assert place.shut_down(child, place.control) == 0
