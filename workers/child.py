"""Process entry of every child: `python -P -m workers.child MODULE --lifeline FD` runs MODULE's
`main(config)`.

The process watches its parent before it imports the module, because importing torch takes seconds, and the
children of a killed parent must exit at once. Its configuration may come later than the start; the import
runs meanwhile.
"""

from __future__ import annotations

import gc
import importlib
import sys

from workers.lifetime import enter


def main() -> None:
    """Exits with the exit code that the module's `main` returns."""
    if len(sys.argv) != 4 or sys.argv[2] != "--lifeline" or not sys.argv[3].isdigit():
        sys.exit("this process is started by launch.py, not by hand")
    config = enter(int(sys.argv[3]))
    # Imports create no garbage: collecting takes an eighth of the time of the coordinator's imports.
    gc.disable()
    module = importlib.import_module(sys.argv[1])
    gc.freeze()
    gc.enable()
    sys.exit(module.main(config.result()))


if __name__ == "__main__":
    main()
