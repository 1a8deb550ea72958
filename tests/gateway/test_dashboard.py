"""The dashboard in a real browser, beside an engine that answers, loses a worker and is restarted."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from protocol.client import Client

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("Debian's chromium is not installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="of the extra `dev`")
# No sandbox for root; the others keep it from asking its makers' servers.
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LIMIT = 40_000  # ms
STEPS = 10


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, served: Any) -> Iterator[Any]:
    """The dashboard. It must have asked no other server, and nothing in it may have failed."""
    opened = browser.new_page()
    asked: list[str] = []
    failed: list[str] = []
    opened.set_default_timeout(LIMIT)
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: failed.append(str(error)))
    opened.goto(f"{served.url}/")
    yield opened
    opened.close()
    here = urlsplit(served.url).netloc
    assert not [url for url in asked if urlsplit(url).netloc not in (here, "")]
    assert not failed


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Answers run, one after the other, until the end of the block; also after one has failed."""
    body = {
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": 200,
        "ignore_eos": True,
    }
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), kind)
            try:
                urllib.request.urlopen(request, timeout=60).close()
            except OSError:
                ended.wait(0.2)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_until(page: Any, condition: str) -> None:
    """Not `wait_for_function`, which evaluates a text in the page: its policy forbids that."""
    until = time.monotonic() + LIMIT / 1e3
    while not page.evaluate(condition):
        assert time.monotonic() < until, condition
        page.wait_for_timeout(50)


def frames(page: Any) -> int:
    return int(page.get_attribute("#experts", "data-frames") or 0)


def wait_for_frames(page: Any, more: int) -> None:
    known = frames(page)
    wait_until(page, f"+document.getElementById('experts').dataset.frames >= {known + more}")


def test_page_is_live_while_an_answer_runs(page: Any, served: Any) -> None:
    with answering(served.url):
        page.wait_for_selector("#state[data-state=up]")
        wait_until(page, "+document.getElementById('decode').textContent > 0")
        wait_for_frames(page, 3)
        assert "all-host" in page.inner_text("#policy")
        assert "A step takes" in page.inner_text("#why")


def test_page_goes_on_after_the_engine_is_killed(page: Any, served: Any) -> None:
    with answering(served.url):
        wait_until(page, "+document.getElementById('decode').textContent > 0")
        supervisor = psutil.Process(served.process.pid)
        supervisor.suspend()  # so that the restart waits until the page has shown the loss
        try:
            served.child("pipeline.coordinator").kill()
            page.wait_for_selector("#state[data-state=away]")
        finally:
            supervisor.resume()
        wait_until(page, "/restarted once/.test(document.getElementById('state').innerText)")
        wait_for_frames(page, 3)


def test_files_allow_nothing_from_elsewhere(served: Any) -> None:
    with served.http() as http:
        answer = http.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert http.get("/dashboard/page.js").headers["content-type"].startswith("text/javascript")
        assert http.get("/dashboard/no.js").text == answer.text  # the page, and no file of this machine


def test_activity_counts_the_experts_of_each_step(served: Any) -> None:
    async def ask() -> None:
        async with Client.connect(served.endpoint) as client:
            before = await client.expert_activity()
            await client.generate(token_ids=[5], max_tokens=STEPS, ignore_eos=True).result()
            after = await client.expert_activity()
        layers, _ = after.used.shape
        used = after.used - before.used
        assert used.sum(1).tolist() == [2 * STEPS] * layers  # two experts a token
        assert used.max() <= STEPS
        assert not after.device.any()  # all-host
        assert not after.resident.any()

    with ThreadPoolExecutor(1) as beside:  # playwright has an event loop in this thread
        beside.submit(asyncio.run, ask()).result()
