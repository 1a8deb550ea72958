"""Errors of huggingface_hub, translated to one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit

from launch.errors import DownloadFailed, LaunchError, WrongUsage

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@contextmanager
def translate(name: str, *, answered: bool) -> Iterator[None]:
    """Raises WrongUsage where the Hub refuses this model, DownloadFailed for everything else that
    huggingface_hub raises in the block. `answered`: the Hub has answered before."""
    from huggingface_hub.errors import HfHubHTTPError

    # the base of httpx's errors, or of httpx2's, whichever this version of the library uses
    transport = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    try:
        yield
    except (OSError, ValueError, transport) as error:
        raise _translated(name, answered, error, transport) from None


def _translated(name: str, answered: bool, error: Exception, transport: type[Exception]) -> LaunchError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = urlsplit(constants.ENDPOINT).netloc
    # Where the Hub refuses a file, the library looks for it in the cache, and raises that it is not there.
    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RevisionNotFoundError):
        return WrongUsage(f"{name}: the model is on {hub}, but not in this revision")
    if isinstance(error, GatedRepoError) or status == 403:
        return WrongUsage(f"{name}: access is restricted: request it on the page at {hub}, then {LOG_IN}")
    if isinstance(error, RepositoryNotFoundError):
        text = f"no folder of this name is here, and {hub} has no such model, or it is private"
        return WrongUsage(f"{name}: {text}; check the name, or {LOG_IN}")
    if status == 401:
        return WrongUsage(f"{name}: {hub} does not accept the token that is set here; {LOG_IN}")
    if status is not None:
        return DownloadFailed(f"{name}: {hub} answers with error {status}; try again later")
    if isinstance(error, OfflineModeIsEnabled):
        text = "is not in the cache of this machine, and HF_HUB_OFFLINE forbids downloading it"
        return DownloadFailed(f"{name} {text}; unset it, or give a folder with --model")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError):  # an answer that is no JSON, say
        return DownloadFailed(f"{name}: {hub} does not answer as the Hub does: {reason[:160]}")
    if answered:
        return DownloadFailed(f"{name}: the download stopped: {reason[:160]}; start again to continue")
    if isinstance(error, transport):
        elsewhere = f"`hf download {name.partition('@')[0]} --local-dir DIR`"
        return DownloadFailed(
            f"{name}: no folder of this name is here, and {hub} cannot be reached ({reason[:120]}): without "
            f"a network, download it on another machine ({elsewhere}) and give that folder with --model"
        )
    return DownloadFailed(f"{name}: cannot be downloaded: {reason[:160]}")
