"""A small Hugging Face Hub on this machine: the requests that huggingface_hub sends to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")
BRANCH = "fedcba9876543210fedcba9876543210fedcba98"  # of the branch `other`


@dataclass
class Repository:
    files: dict[str, bytes]
    refuse: tuple[int, str] | None = None  # status and X-Error-Code of every answer
    refuse_files: tuple[int, str] | None = None  # of every answer with a file's content, as gated models have
    sizes: dict[str, int] = field(
        default_factory=dict
    )  # in the list of files, where they differ from the true ones
    gguf: dict[str, Any] | None = None  # what the Hub says of GGUF files
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "other": BRANCH})


class HubServer:
    """`with HubServer() as hub`: repositories by name in `hub.repositories`; `hub.endpoint` for HF_ENDPOINT.

    `asked`: every request as "METHOD path". `stuck`: the file with this name is sent in halves, the second
    only after `go` is set; `half` is set after the first. `lost`: the second half and all later answers are
    cut off instead."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.stuck = ""
        self.lost = False
        self.half = threading.Event()
        self.go = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def sent(self, repository: str = "") -> list[str]:
        """Names of the files with requested content, in order; of one repository or of all."""
        gets = [line for line in self.asked if line.startswith("GET")]
        return [line.rpartition("/")[2] for line in gets if f"{repository}/resolve/" in line]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.lost:
            self.close_connection = True
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._about("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "")

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(401, "RepoNotFound")  # the Hub's answer to requests without a token
        if repository.refuse is not None:
            return self._refuse(*repository.refuse)
        commit = repository.commits.get(revision, revision)
        if commit not in repository.commits.values():
            return self._refuse(404, "RevisionNotFound")
        return repository, commit

    def _about(self, name: str, revision: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        siblings = []
        for file, content in repository.files.items():
            size = repository.sizes.get(file, len(content))
            entry: dict[str, Any] = {"rfilename": file, "size": size, "blobId": _hash(content)[:40]}
            if file.endswith(LARGE):
                entry["lfs"] = {"size": size, "sha256": _hash(content), "pointerSize": 134}
            siblings.append(entry)
        about = {"_id": "0", "id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
        if repository.gguf is not None:
            about["gguf"] = repository.gguf
        self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        if repository.refuse_files is not None:
            self._refuse(*repository.refuse_files)
        elif file not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            content = repository.files[file]
            etag = _hash(content) if file.endswith(LARGE) else _hash(content)[:40]
            self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, file)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, content: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if file and file == self.hub.stuck:
                middle = len(content) // 2
                self.wfile.write(content[:middle])
                self.wfile.flush()
                self.hub.half.set()
                self.hub.go.wait(60)
                if self.hub.lost:
                    self.close_connection = True
                    return
                content = content[middle:]
            self.wfile.write(content)
        except ConnectionError:  # the other side was killed, as some tests want
            self.close_connection = True


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
