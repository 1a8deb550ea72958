"""What the clients of an account may take: places, refusals, time for their messages, and after a cut-off
nothing for a while. Runs in the event loop; `charge` may run in any thread.

Limits of a remote client hold for all connections of its key, later ones included. Local clients are all the
same user's, so each stands for itself."""

from __future__ import annotations

import time

from pipeline.accounts import LOCAL, account_of
from pipeline.rate_limit import RateLimiter, TimeShare

REFUSED_LIMIT = 20  # refused messages in a second
CUT_OFF_SECONDS = 10.0  # during which messages of those that were cut off are dropped
CUT_OFF_MOST = 256  # local clients, and accounts, that are cut off at once; the oldest is forgotten
COST_SHARE = 0.05  # of one core's time, for handling the messages of an account, or of a local client
COST_BURST = 0.5  # seconds of it at once
MOST_CLIENTS = 512  # in all
LOCAL_PLACES = 128  # of these, for local clients alone
ACCOUNT_PLACES = 64  # for the clients of one key


class AccountLimits:
    """Counts the connected clients of each account."""

    def __init__(self) -> None:
        self._clients: dict[bytes, set[bytes]] = {}  # by account, none of them empty
        self._refusals: dict[bytes, RateLimiter] = {}  # of remote accounts, also without a client
        self._costs: dict[bytes, TimeShare] = {}  # by `_culprit`; of accounts, also without a client
        self._cut_off_until: dict[bytes, float] = {}  # by `_culprit`

    def add(self, client: bytes) -> RateLimiter:
        """A client takes a place. Returns the limiter of its refused messages."""
        account = account_of(client)
        self._clients.setdefault(account, set()).add(client)
        self._costs.setdefault(_culprit(client), TimeShare(COST_SHARE, COST_BURST))
        if account == LOCAL:
            return RateLimiter(REFUSED_LIMIT)
        return self._refusals.setdefault(account, RateLimiter(REFUSED_LIMIT))

    def remove(self, client: bytes) -> None:
        """A client has disconnected."""
        account = account_of(client)
        self._clients[account].remove(client)
        if not self._clients[account]:
            del self._clients[account]
        if account == LOCAL:
            del self._costs[client]

    def charge(self, client: bytes, seconds: float) -> None:
        """Count time that handling a client's messages took: decoding, checking and refusing them, not the
        work that they request. Of a client that has disconnected, its account's."""
        cost = self._costs.get(_culprit(client))
        if cost is not None:
            cost.spend(seconds)

    def too_costly(self, client: bytes) -> bool:
        """Whether this client, of a remote one its account, has spent more than its share."""
        cost = self._costs.get(_culprit(client))
        return cost is not None and cost.wait > 0

    def no_place(self, account: bytes) -> str:
        """Why no further client of this account can connect; "" where one can."""
        clients = sum(map(len, self._clients.values()))
        if clients >= MOST_CLIENTS:
            return f"{clients} clients are connected already; try again later"
        if account != LOCAL:
            remote = clients - len(self._clients.get(LOCAL, ()))
            if remote >= MOST_CLIENTS - LOCAL_PLACES:
                return f"{remote} remote clients are connected already; try again later"
            if len(self._clients.get(account, ())) >= ACCOUNT_PLACES:
                return f"{ACCOUNT_PLACES} clients with this key are connected already; try again later"
        return ""

    def cut_off(self, client: bytes) -> set[bytes]:
        """From now on this client, of a remote one its whole account, is cut off. Returns these clients."""
        culprit = _culprit(client)
        while len(self._cut_off_until) >= CUT_OFF_MOST:
            del self._cut_off_until[next(iter(self._cut_off_until))]
        self._cut_off_until[culprit] = time.monotonic() + CUT_OFF_SECONDS
        return {client} if culprit == client else {client, *self._clients.get(culprit, ())}

    def is_cut_off(self, client: bytes) -> bool:
        """`client` may be a remote account, too."""
        culprit = _culprit(client)
        until = self._cut_off_until.get(culprit, 0.0)
        if until and until < time.monotonic():
            del self._cut_off_until[culprit]
            return False
        return until > 0.0


def _culprit(client: bytes) -> bytes:
    account = account_of(client)
    return client if account == LOCAL else account
