"""Process entry of every child: `python -m workers.child MODULE --lifeline FD` runs MODULE's `main(config)`.

The process is tied to its parent's life before it imports what it runs: importing torch can take longer than
a killed parent's children may live. It may be told later what it is to do: then it has imported by that time.
"""

from __future__ import annotations

import gc
import importlib
import sys

from workers.lifetime import enter


def main() -> None:
    """Exits with what the module's `main` returns."""
    if len(sys.argv) != 4 or sys.argv[2] != "--lifeline" or not sys.argv[3].isdigit():
        sys.exit("this process is started by launch.py, not by hand")
    told = enter(int(sys.argv[3]))
    # Nothing that is imported becomes garbage: to look for it takes an eighth of the coordinator's imports.
    gc.disable()
    module = importlib.import_module(sys.argv[1])
    gc.freeze()
    gc.enable()
    sys.exit(module.main(told.result()))


if __name__ == "__main__":
    main()
