"""A request whose text crashes the text process, over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from gateway_engine import Served, serve
from waiting import until

from pipeline.assets import model_dir

LOOPS = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
WORDS = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 60, "maxItems": 60}
FORMED = {
    "messages": [{"role": "user", "content": "Name colours."}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": WORDS}},
    "max_tokens": 600,
    "stream": True,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of the embedded model, with a template that does not end for one text."""
    pytest.importorskip("llguidance", reason="of the extra `serve`")
    folder: Path = tmp_path_factory.mktemp("looping")
    shutil.copytree(model_dir(), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve("--model", str(folder)) as running:
        yield running


async def busy(served: Served, idle: int, checks: int = 50) -> psutil.Process:
    """Wait until the text process has a job that lasts, for which it has a thread more than idle."""
    process: psutil.Process | None = None
    seen = 0
    while seen < checks:
        await asyncio.sleep(0.01)
        try:
            process = process or served.child("pipeline.text.process")
            seen = seen + 1 if process.num_threads() > idle else 0
        except (LookupError, psutil.Error):  # it is being restarted
            process, seen = None, 0
    assert process is not None
    return process


async def formed(http: httpx.AsyncClient, parts: list[str]) -> None:
    """Read the stream of an answer in a form."""
    async with http.stream("POST", "/v1/chat/completions", json=FORMED) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event: Any = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]


async def test_a_text_that_crashes_the_text_process_twice_is_not_sent_again(served: Served) -> None:
    """It fails, named. An answer in a form, whose masks that process makes, goes on, as other texts do."""
    idle = served.child("pipeline.text.process").num_threads()
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        parts: list[str] = []
        beside = asyncio.create_task(formed(http, parts))
        await until(lambda: len(parts) > 5)
        looping = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}
        poisoned = asyncio.create_task(http.post("/v1/chat/completions", json=looping))
        crashes = 0
        while not poisoned.done() and crashes < 3:
            waiting = asyncio.create_task(busy(served, idle))
            await asyncio.wait((waiting, poisoned), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result().send_signal(signal.SIGSEGV)
                crashes += 1
                await asyncio.sleep(0.1)
            waiting.cancel()
        assert 1 <= crashes <= 2
        refused = await poisoned
        assert refused.status_code == 400
        line = refused.json()["error"]["message"]
        assert line.startswith("messages: encoding this text ended the text process")
        assert (await http.post("/v1/chat/completions", json=hello)).status_code == 200
        last = served.child("pipeline.text.process").pid
        await beside
        assert served.child("pipeline.text.process").pid == last
    assert set(json.loads("".join(parts))) <= {"red", "blue"}
