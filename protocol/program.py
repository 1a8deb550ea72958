"""Names by which messages write this installation's commands (`pip install` copies no launch.py); its
user's folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_CHECKOUT = (Path(__file__).resolve().parents[1] / "launch.py").is_file()
PROGRAM = "launch.py" if _CHECKOUT else "tandem"  # where a command is only named
COMMAND = "python launch.py" if _CHECKOUT else "tandem"  # where it is to be typed
REPAIR = "in Tandem's folder run: make -B run" if _CHECKOUT else "install Tandem again with pip"

DEFAULTS = {"CACHE": ".cache", "STATE": ".local/state"}


def user_folder(kind: Literal["CACHE", "STATE"]) -> Path:
    """$XDG_<kind>_HOME/tandem, usually a folder of that name in ~/.cache or ~/.local/state; it may be
    missing. By the XDG rules, a variable that is not an absolute path counts as not set."""
    given = os.environ.get(f"XDG_{kind}_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / DEFAULTS[kind]) / "tandem"
