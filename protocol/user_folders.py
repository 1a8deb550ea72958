"""This user's folders by the XDG rules: a variable that is not an absolute path counts as not set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

DEFAULTS = {"CACHE": ".cache", "STATE": ".local/state"}


def user_folder(kind: Literal["CACHE", "STATE"]) -> Path:
    """$XDG_<kind>_HOME/tandem, usually a folder of that name in ~/.cache or ~/.local/state; it may be
    missing."""
    given = os.environ.get(f"XDG_{kind}_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / DEFAULTS[kind]) / "tandem"
