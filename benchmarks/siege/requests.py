"""The hostile requests of a siege, by kind: what is sent on a connection, and how its client behaves then."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import zstandard

VARIANTS = 32  # of each kind: making one may take longer than sending it
TURNS = 16  # requests of a connection that waits for each answer
BURST = 64  # requests of a connection that waits for none
COMPLETIONS = "/v1/completions"
PATHS = ("/", "/health", "/web/chat.js", "/v1/models", COMPLETIONS, "/v1/messages", "/dashboard/events")
NAMES = (
    "prompt max_tokens temperature top_k n seed stop logit_bias stream echo response_format logprobs".split()
)
NAMES += "best_of suffix model stream_options x".split()
End = Literal["read", "drop", "hold"]


@dataclass(frozen=True)
class Attack:
    """`make`: what one connection sends, its requests one by one where it waits for each answer, else at
    once. `end`: it reads the answers, disconnects, or keeps the connection and reads nothing. `share`: of a
    siege's requests. `computed`: the engine has work with it."""

    share: float
    make: Callable[[Random, str], bytes]
    requests: int = 1
    turns: bool = False
    end: End = "read"
    computed: bool = False


def request(
    path: str, key: str, body: bytes = b"", fields: Sequence[str] = (), method: str = "POST"
) -> bytes:
    """Returns a request; `fields`: more of its head."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key}", *fields]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def completion(key: str, **body: Any) -> bytes:
    """Returns a completion's request."""
    whole = {"prompt": "x", "max_tokens": 4} | body
    return request(COMPLETIONS, key, json.dumps(whole).encode())


def _size(random: Random, least: int, most: int) -> int:
    """Draw a size; each order of magnitude is as frequent."""
    return int(least * (most / least) ** random.random())


# --- without a key --------------------------------------------------------------------------------------


def _bad_head(random: Random, key: str) -> bytes:
    head = request(random.choice(PATHS), key, method=random.choice(("GET", "POST")))
    match random.randrange(6):
        case 0:
            return random.randbytes(random.randrange(1, 400)) + b"\r\n\r\n"
        case 1:
            return random.randbytes(random.randrange(1, 3)) + head
        case 2:
            return head.replace(b"HTTP/1.1", random.choice((b"HTTP/9.9", b"HTTP/1.1 x", b"", b"ICE/1.0")))
        case 3:
            return head.replace(b"host", random.choice((b"ho st", b"h\0st", b": ", b" host", b"host\r")))
        case 4:
            return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        case _:
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(200)  # TLS


def _framing(random: Random, key: str) -> bytes:
    """Lengths and chunks that contradict each other."""
    fields = random.choice(
        [
            ["content-length: 5", "transfer-encoding: chunked"],
            ["content-length: 5", "content-length: 6"],
            [f"content-length: {random.choice(('-1', '1e3', '9' * 40, '0x10', '1,2'))}"],
            ["transfer-encoding: chunked"],
            ["transfer-encoding: chunked, gzip"],
            ["expect: 100-continue", "content-length: 3"],
            ["upgrade: websocket", "connection: upgrade", "sec-websocket-key: eA=="],
        ]
    )
    sizes = (b"ffffffffffffffff", b"-1", b"5;" + b"x" * 2000, b"zz", b"0")
    return request(COMPLETIONS, key, fields=fields) + random.choice(sizes) + b"\r\nhello\r\n0\r\n\r\n"


def _oversized(random: Random, key: str) -> bytes:
    return request("/health", key, fields=["x: " + "y" * _size(random, 65_000, 1_000_000)], method="GET")


def _many_fields(random: Random, key: str) -> bytes:
    return request("/health", key, fields=[f"a{n}: b" for n in range(_size(random, 257, 6000))], method="GET")


def _unfinished_head(random: Random, key: str) -> bytes:
    head = request("/health", key, fields=["x: " + "y" * random.randrange(2000)], method="GET")
    return head[: random.randrange(len(head) - 1)]


def _bad_key(random: Random, key: str) -> bytes:
    return completion("".join(chr(random.randrange(33, 127)) for _ in range(random.randrange(300))))


def _cross_site(random: Random, key: str) -> bytes:
    fields = random.choice(
        [
            ["sec-fetch-site: cross-site", f"sec-fetch-dest: {random.choice(('image', 'iframe', 'script'))}"],
            ["origin: https://evil.example", "sec-fetch-site: cross-site"],
            ["origin: null"],
        ]
    )
    return request(random.choice(PATHS), key, fields=fields, method=random.choice(("GET", "POST", "OPTIONS")))


def _nothing_there(random: Random, key: str) -> bytes:
    paths = (
        "/web/../../etc/passwd",
        "/" + "a" * random.randrange(3000),
        "/v1/models/%00",
        "//",
        "/web/%2e%2e",
    )
    return request(random.choice((*paths, *PATHS[4:6])), "", method=random.choice(("GET", "PUT", "DELETE")))


def _pipeline(random: Random, key: str) -> bytes:
    return request(random.choice(PATHS), "", method="GET") * BURST


def _files(random: Random, key: str) -> bytes:
    return request("/web/chat.js", "", method="GET") * 2


# --- with a key -----------------------------------------------------------------------------------------


def _containers(random: Random, key: str) -> bytes:
    unit = random.choice((b"[]", b"{}", b'{"a":[]}', b"[[[[[[]]]]]]", b'[{"":0}]', b"0.5"))
    body = b'{"prompt":[' + b",".join([unit] * (_size(random, 100, 8 << 20) // (len(unit) + 1) + 1)) + b"]}"
    return request(COMPLETIONS, key, b"[" * 100_000 if random.random() < 0.1 else body)


def _long_strings(random: Random, key: str) -> bytes:
    """Prompts are longer than the context."""
    text = random.choice(("x", "x ", "\U0001f600", "é\n", "{[", '"\\')) * _size(random, 300_000, 2 << 20)
    name = random.choice(("prompt", "model", "stop", "user", "x" * 100_000))
    return completion(key, **{name: text[: 2 << 20], "max_tokens": 1})


def _exponents(random: Random, key: str) -> bytes:
    number = random.choice(
        (b"1e308", b"1e-320", b"123456789e-300", b"9" * 300 + b"e9", b"1e999999999", b"0e0")
    )
    numbers = b",".join([number] * (_size(random, 10, 1 << 20) // len(number) + 1))
    return request(COMPLETIONS, key, b'{"temperature":%b,"prompt":[%b]}' % (number, numbers))


def _half_pairs(random: Random, key: str) -> bytes:
    halves = random.choice((rb"\ud800", rb"\udfff", rb"\ud83d\u0041", rb"\\\ud800", rb"\u0000", rb"\ud8"))
    repeated = halves * _size(random, 1, 100_000)
    return request(COMPLETIONS, key, b'{"prompt":"%b","max_tokens":1,"stop":"%b"}' % (halves, repeated))


def _bomb(random: Random, key: str) -> bytes:
    plain = random.choice((b"\0", b"[", b'{"prompt":"', b" ")) * (random.choice((1, 16, 33)) << 20)
    coding = random.choice(("gzip", "deflate", "zstd"))
    if coding == "zstd":
        body = zstandard.compress(plain[: 33 << 20])
    else:
        body = zlib.compress(plain[: 33 << 20], 1, wbits=31 if coding == "gzip" else 15)
    cut = body if random.random() < 0.8 else body[: len(body) // 2]
    return request(COMPLETIONS, key, cut, [f"content-encoding: {coding}"])


def _trailers(random: Random, key: str) -> bytes:
    head = request(COMPLETIONS, key, fields=["transfer-encoding: chunked", "content-type: application/json"])
    chunks = b"1\r\n \r\n" * _size(random, 1, 20_000) + b"2\r\n[]\r\n0\r\n"
    return head + chunks + b"a: b\r\n" * _size(random, 1, 4000) + b"\r\n"


def _values(random: Random, key: str) -> bytes:
    strange: list[Any] = [None, -1, 0, 1e300, 2**63, "", "x", [], {}, [[]], {"a": []}, True, [-1], ["x", 1]]
    given = {name: random.choice(strange) for name in random.sample(NAMES, random.randrange(1, 6))}
    return completion(key, **(given | {"max_tokens": random.choice((1, -1, "x", 10**30))}))


def _grammar(random: Random, key: str) -> bytes:
    many = _size(random, 10, 6000)
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(many)} | {str(many): {"type": "null"}}
    nested: dict[str, Any] = {}
    for _ in range(random.randrange(1, 180)):
        nested = {"type": random.choice(("array", "object")), "items": nested, "properties": {"a": nested}}
        nested.pop(random.choice(("items", "properties")))
    choices = {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    schema = random.choice(
        [
            {"$ref": "#/$defs/0", "$defs": chain},
            {"$ref": "#"},
            {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]},
            nested,
            {"enum": [f"{random.random()}" for _ in range(many)]},
            {
                "type": "string",
                "pattern": random.choice(("(a{1,1000}){1,1000}", "(.*a){60}", "(a|aa)+$", "[")),
            },
            {"type": "string", "minLength": 10**9},
            {"type": "array", "minItems": 10**6, "items": {"type": "integer", "minimum": -(10**300)}},
            {"properties": {f"p{n}": {"type": "number", "multipleOf": 1e-9} for n in range(many)}},
            {"allOf": [choices] * random.randrange(2, 24)},
            {"x-guidance": {"whitespace_pattern": "(a*)*"}, "type": "object"},
        ]
    )
    return completion(key, response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def _stream(random: Random, key: str) -> bytes:
    return completion(key, prompt=f"{random.random()} " * random.randrange(9), max_tokens=16, stream=True)


def _unfinished_body(random: Random, key: str) -> bytes:
    fields = [f"content-length: {_size(random, 1000, 32 << 20)}", "content-type: application/json"]
    return request(COMPLETIONS, key, fields=fields) + b" " * _size(random, 1, 900)


def _events(random: Random, key: str) -> bytes:
    return request("/dashboard/events", key, method="GET") * random.choice((1, 2))


ATTACKS = {
    "pipelines": Attack(0.3, _pipeline, BURST),
    "bad heads": Attack(0.15, _bad_head),
    "bad keys": Attack(0.17, _bad_key, TURNS, turns=True),
    "cross-site": Attack(0.1, _cross_site, TURNS, turns=True),
    "wrong paths": Attack(0.1, _nothing_there, TURNS, turns=True),
    "contradicting lengths": Attack(0.05, _framing),
    "oversized heads": Attack(0.02, _oversized),
    "heads of many fields": Attack(0.02, _many_fields),
    "unfinished heads": Attack(0.03, _unfinished_head, end="hold"),
    "heads, abandoned": Attack(0.03, _unfinished_head, end="drop"),
    "files, not read": Attack(0.02, _files, 2, end="hold"),
    "values": Attack(0.03, _values),
    "containers": Attack(0.003, _containers),
    "long strings": Attack(0.002, _long_strings, computed=True),
    "exponents": Attack(0.003, _exponents),
    "half pairs": Attack(0.003, _half_pairs),
    "bombs": Attack(0.001, _bomb),
    "chunks and trailers": Attack(0.01, _trailers),
    "grammars": Attack(0.001, _grammar, computed=True),
    "streams, not read": Attack(0.001, _stream, end="hold", computed=True),
    "streams, abandoned": Attack(0.002, _stream, end="drop", computed=True),
    "unfinished bodies": Attack(0.02, _unfinished_body, end="hold"),
    "event streams": Attack(0.002, _events, end="hold"),
}


def prepared(seed: int, keys: Sequence[str]) -> dict[str, list[list[bytes]]]:
    """Returns variants of each kind, by the requests that wait for each other's answers."""
    made = {}
    for kind, attack in ATTACKS.items():
        random = Random(f"{seed} {kind}")
        turns = attack.requests if attack.turns else 1
        made[kind] = [
            [attack.make(random, random.choice(keys)) for _ in range(turns)] for _ in range(VARIANTS)
        ]
    return made
