"""Token ids to text. `Detokenizer` has all that this takes of a tokenizer, and searches with no regular
expression of a model's: the text process writes it to a file, and the coordinator reads that.

`TextStream` is incremental: the text of each new token that no later token can change. `ByteDecoder` or
`RunDecoder` returns the text that the ids so far make certain; `StopStrings` holds back text that could still
become a stop string. In total the text is exactly the tokenizer's own decoding of all ids without special
tokens, cut at the first stop string. The work for a token does not grow with the answer.

The `tokenizers` library's DecodeStream is not used: it returns the text of a byte-fallback token at once,
although the next byte can change it, and then fails on such ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError, RequestError
from shm.atomic_file import atomic_file

DECODER = "decoder.json"  # the file, in the engine's directory
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
QUICK = 65536  # characters; shorter texts are encoded in less time than a step
UNUSED = ("pre_tokenizer", "post_processor")  # parts that only encode; a normalizer spells added tokens
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The decoding half of a model's tokenizer. Immutable. `eos_ids` end an answer; `marks` are the special
    tokens that mark reasoning and calls of tools in one."""

    def __init__(self, backend: Any, eos_ids: Collection[int], marks: Collection[int] = ()) -> None:
        """`backend`: a tokenizer of the `tokenizers` library. Raises ModelError for an unsupported
        decoder."""
        self.eos_ids = frozenset(eos_ids)
        self.marks = frozenset(marks)
        self._backend = backend
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoders = list(_decoders(backend))
        kinds = {decoder["type"] for decoder in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if self._byte_level and kinds - {"ByteLevel", "Fuse"}:
            raise ModelError(f"the tokenizer chains decoders that are not supported: {sorted(kinds)}")
        if any("Regex" in (decoder.get("pattern") or ()) for decoder in decoders):
            raise ModelError("the tokenizer decodes by a regular expression, which is not supported")
        self._bytes: dict[int, bytes] = {}
        self._letters = _byte_level_letters()

    @classmethod
    def read(cls, path: Path) -> Detokenizer:
        """Read what `write` wrote. Raises OSError."""
        from tokenizers import Tokenizer

        ids, _, described = path.read_text().partition("\n")
        return cls(Tokenizer.from_str(described), *json.loads(ids))

    def write(self, path: Path) -> None:
        """Write it, without what only encodes. It has been loaded once, so its load takes no longer."""
        described = json.loads(self._backend.to_str()) | dict.fromkeys(UNUSED)
        if "merges" in described["model"]:
            described["model"]["merges"] = []
        with atomic_file(path, sync=False) as file:
            ids = json.dumps([sorted(self.eos_ids), sorted(self.marks)])
            file.write(f"{ids}\n{json.dumps(described)}".encode())

    def min_tokens(self, characters: int) -> int:
        """Returns a lower bound on the tokens of so many characters; 0 where encoding takes no time."""
        if characters <= QUICK:
            return 0
        return characters // (2 * self._longest)  # twice: a normalizer may shorten the text

    @cached_property
    def _longest(self) -> int:
        """Returns the characters of the longest token; a byte-level one has as many letters as bytes."""
        return max(map(len, self._backend.get_vocab()))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens and unknown ids; invalid UTF-8, and what the
        library fails on, becomes U+FFFD."""
        try:
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library's panics are no Exception
            return "\ufffd"
        return text

    def pieces(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the bytes of each token by itself, the spelling of a special one; none for an unknown
        id."""
        return tuple(map(self._piece, ids))

    def stream(self, stop: Sequence[str], *, marks: bool = False) -> TextStream:
        """Returns a new answer's text, up to the first stop string; `marks`: with the text of those special
        tokens. Raises RequestError for unusable stop strings."""
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(stop)} stop strings are too many; at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in stop:
            if not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed"
                )
        bytewise = ByteDecoder(self._token_bytes) if self._byte_level else None
        decoder = bytewise or RunDecoder(self.decode, self._is_byte)
        spelled = {token: self._backend.id_to_token(token) for token in self.marks} if marks else {}
        return TextStream(decoder, StopStrings(stop), self._special.__contains__, spelled)

    def _piece(self, token: int) -> bytes:
        if token in self._special:
            return (self._backend.id_to_token(token) or "").encode()
        return self._token_bytes(token) if self._byte_level else self.decode((token,)).encode()

    def _token_bytes(self, token: int) -> bytes:
        """Returns a byte-level token's bytes; an added token that is not spelled in byte letters is plain
        text."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._backend.id_to_token(token) or ""
            if all(letter in self._letters for letter in piece):
                known = bytes(self._letters[letter] for letter in piece)
            else:
                known = piece.encode()
            self._bytes[token] = known
        return known

    def _is_byte(self, token: int) -> bool:
        piece = self._backend.id_to_token(token)
        # An unknown id has no text, so it ends no run of byte tokens.
        return piece is None or (self._byte_fallback and _BYTE_TOKEN.fullmatch(piece) is not None)


def _decoders(backend: Any) -> Iterator[dict[str, Any]]:
    """Yields the decoders in a tokenizer's chain, as in tokenizer.json."""
    # The decoder's own JSON: the whole tokenizer's holds every token and takes long to write.
    pending = [] if backend.decoder is None else [json.loads(backend.decoder.__getstate__())]
    while pending:
        decoder = pending.pop()
        if decoder["type"] == "Sequence":
            pending += decoder["decoders"]
        else:
            yield decoder


def _byte_level_letters() -> dict[str, int]:
    """Returns the byte of each letter in byte-level vocabularies. A byte's letter is itself where it is
    printable in Latin-1, else the next letter from U+0100 on."""
    letters = {}
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            letters[chr(byte)] = byte
        else:
            letters[chr(spare)] = byte
            spare += 1
    return letters


class ByteDecoder:
    """Decoder of byte-level vocabularies: every token is bytes, and the text is all of them as UTF-8 with
    U+FFFD for invalid bytes. Only an incomplete character at the end is uncertain."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token, which is not special."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """Returns the rest of the text, when no token follows."""
        return self._decoder.decode(b"", final=True)


class RunDecoder:
    """Decoder of vocabularies in which a token's text depends on its neighbours: the first token loses its
    leading space, and a run of byte tokens is decoded as a whole (one invalid byte makes all of it invalid,
    so none of it is certain before it ends). Tokens are decoded once they are certain, behind the last
    token before them, which stands in for all earlier ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str], is_byte: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._before: list[int] = []  # the last decoded token, if any
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token, which is not special."""
        self._waiting.append(token)
        return "" if self._is_byte(token) else self.finish()  # no later token can change these

    def finish(self) -> str:
        """Returns the rest of the text, when no token follows."""
        if not self._waiting:
            return ""
        start = len(self._decode(self._before)) if self._before else 0
        text = self._decode(self._before + self._waiting)[start:]
        self._before = self._waiting[-1:]
        self._waiting = []
        return text


class StopStrings:
    """Finds the first complete stop string (the longest of several that end together), wherever the text is
    split, and holds back text that could still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: non-empty strings."""
        self._stop = tuple(stop)
        self._held = ""
        self.found = False
        self.matched = ""  # the stop string that was found

    def push(self, text: str) -> str:
        """Returns the text that is certain to be before any stop string, and was not returned yet."""
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self._stop]
        ends = [(place + len(stop), -len(stop), stop) for place, stop in places if place >= 0]
        if ends:
            end, length, self.matched = min(ends)
            self.found = True
            self._held = ""
            return text[: end + length]
        certain = min((_possible_start(text, stop) for stop in self._stop), default=len(text))
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Returns the text that was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _possible_start(text: str, stop: str) -> int:
    """Returns the place of the longest end of a text that a stop string begins with."""
    place = max(len(text) - len(stop) + 1, 0)
    while (place := text.find(stop[0], place)) >= 0:
        if stop.startswith(text[place:]):
            return place
        place += 1
    return len(text)


class TextStream:
    """The text of one answer. `stopped` is set once a stop string is complete; no text follows it."""

    def __init__(
        self,
        decoder: ByteDecoder | RunDecoder,
        stop: StopStrings,
        is_special: Callable[[int], bool],
        spelled: Mapping[int, str],
    ) -> None:
        """`spelled`: special tokens with a text, and that."""
        self._decoder = decoder
        self._stop = stop
        self._is_special = is_special
        self._spelled = spelled

    @property
    def stopped(self) -> bool:
        return self._stop.found

    @property
    def matched(self) -> str:
        """The stop string that is complete, "" before."""
        return self._stop.matched

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token. Unknown ids have none, nor have special
        tokens but the spelled ones."""
        if self.stopped:
            return ""
        if token in self._spelled:
            return self._stop.push(self._decoder.finish() + self._spelled[token])
        if self._is_special(token):
            return ""
        return self._stop.push(self._decoder.push(token))

    def resume(self, tokens: Sequence[int]) -> None:
        """Continue behind these tokens; an earlier stream has returned their text."""
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        """Returns the rest of the text. It can complete a stop string, so `stopped` may change."""
        if self.stopped:
            return ""
        text = self._stop.push(self._decoder.finish())
        return text if self.stopped else text + self._stop.finish()
