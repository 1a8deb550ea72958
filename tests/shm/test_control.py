"""The control segment: lines of one writer each, read by others, also from other processes."""

from collections.abc import Iterator

import pytest
from small_store import run

from shm.control import IDLE, ControlSegment


@pytest.fixture
def control(name) -> Iterator[ControlSegment]:
    """For the prefetcher, the coordinator and three workers."""
    made = ControlSegment.create(name, 3)
    yield made
    made.close()


def lines(control: ControlSegment) -> list[tuple[int, int]]:
    others = (control.line(role, 0) for role in ("prefetcher", "coordinator"))
    found = [*others, *(control.line("worker", index) for index in range(3))]
    return [(line.ticks, line.seq) for line in found]


def test_writes_of_another_process_appear_on_its_line_alone(control):
    code = (
        "import sys; from shm.control import ControlSegment\n"
        "control = ControlSegment.attach(sys.argv[1])\n"
        "line = control.line('worker', 1)\n"
        "line.begin(1 << 40)\n"
        "for _ in range(5): line.tick()\n"
        "control.line('worker', 2).begin(7); control.line('worker', 2).end()\n"
        "control.line('prefetcher', 0).tick()\n"
        "control.close()\n"
    )
    run(code, control.segment.name).check_returncode()
    assert lines(control) == [(1, IDLE), (0, IDLE), (0, IDLE), (5, 1 << 40), (0, IDLE)]
