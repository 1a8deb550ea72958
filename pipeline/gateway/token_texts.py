"""Tokens and their log-probabilities as clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from protocol.client import Client
from protocol.messages import Token


class TokenTexts:
    """The bytes of tokens, which the engine knows. Those that were asked for are kept."""

    def __init__(self, client: Client, known: dict[int, bytes]) -> None:
        self._client = client
        self._known = known

    async def learn(self, ids: Iterable[int]) -> None:
        """Raises ProtocolError."""
        missing = sorted(set(ids) - self._known.keys())
        if missing and self._client.welcome.has_tokenizer:
            found = await self._client.tokenize(token_ids=missing)
            self._known.update(zip(missing, found.pieces, strict=True))

    def bytes(self, token: int) -> bytes:
        return self._known.get(token, b"")

    def text(self, token: int) -> str:
        """A token that is no whole characters is shown by its bytes."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    async def chat(self, token: Token) -> dict[str, Any]:
        """An entry of `logprobs.content`."""
        await self.learn((token.token, *token.top_tokens))
        best = zip(token.top_tokens, token.top_logprobs, strict=True)
        return self._entry(token.token, token.logprob) | {
            "top_logprobs": [self._entry(other, logprob) for other, logprob in best]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self.bytes(token))}

    def best(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        """A row of the legacy `top_logprobs`: tokens with the same text are one, the best of them."""
        found: dict[str, float] = {}
        for token, logprob in zip(tokens, logprobs, strict=True):
            found.setdefault(self.text(token), logprob)
        return found
