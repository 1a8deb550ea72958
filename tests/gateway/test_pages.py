"""The gateway's pages in a real browser, beside an engine that answers, loses a worker and is restarted."""

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
ANSWER = """A **list** of `n`:

```python
<script>document.title = "run"</script>
    second = "line " + "that goes far beyond the right side of a narrow window"
```

<img src=x onerror="document.title = 'run'"> stays text."""


@pytest.fixture(scope="module")
def served() -> Iterator[object]:
    """Without guesses, so that each token is a step. An answer has a quarter of the context at most."""
    from gateway_engine import serve

    with serve("--speculate", "off", "--context", "512") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@contextmanager
def a_page(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page. It must have asked no other server, and nothing in it may have failed."""
    opened = browser.new_page(**options)
    asked: list[str] = []
    failed: list[str] = []
    opened.set_default_timeout(LIMIT)
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: failed.append(str(error)))
    opened.goto(url)
    yield opened
    opened.close()
    here = urlsplit(url).netloc
    assert not [other for other in asked if urlsplit(other).netloc not in (here, "")]
    assert not failed


def wait_until(page: Any, condition: str) -> None:
    """Not `wait_for_function`, which evaluates a text in the page: its policy forbids that."""
    until = time.monotonic() + LIMIT / 1e3
    while not page.evaluate(condition):
        assert time.monotonic() < until, condition
        page.wait_for_timeout(50)


@pytest.fixture
def dashboard(browser: Any, served: Any) -> Iterator[Any]:
    with a_page(browser, f"{served.url}/dashboard") as opened:
        yield opened


@pytest.fixture
def page(browser: Any, served: Any) -> Iterator[Any]:
    """The chat."""
    with a_page(browser, f"{served.url}/", viewport={"width": 380, "height": 700}) as opened:
        yield opened


# --- the chat -------------------------------------------------------------------------------------------


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.keyboard.press("Enter")


def notes(page: Any) -> list[str]:
    return page.locator(".note").all_inner_texts()


def test_a_conversation_with_the_engine(page: Any) -> None:
    page.fill("#question", "What is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("a list?")
    page.keyboard.press("Enter")
    wait_until(page, "/tok.s/.test(document.querySelector('.note').innerText)")
    assert page.inner_text(".question") == "What is\na list?"
    answer = page.inner_text(".text")
    assert answer
    ask(page, "And a tuple?")
    wait_until(page, "document.querySelectorAll('.note')[1]?.innerText.includes('from the cache')")
    assert ", 0 of them" in notes(page)[0]
    assert ", 0 of them" not in notes(page)[1]  # the first turn was kept
    page.reload()
    assert page.locator(".text").all_inner_texts()[0] == answer
    assert len(notes(page)) == 2
    page.click("#new")
    assert page.inner_text("#log") == ""
    assert page.locator("#log > *").count() == 0


def test_a_narrower_window_keeps_the_end_of_the_conversation(page: Any) -> None:
    page.set_viewport_size({"width": 900, "height": 300})
    for number in range(3):
        ask(page, "What is a generator?")
        page.locator(".note").nth(number).filter(has_text="tokens").wait_for()
    end = "document.getElementById('scroll')"
    page.set_viewport_size({"width": 320, "height": 300})
    wait_until(page, f"{end}.scrollHeight - {end}.scrollTop - {end}.clientHeight < 2")
    assert page.locator("header a").bounding_box()["height"] < 30  # in one line


def test_an_answer_is_stopped_by_a_key(page: Any, served: Any) -> None:
    supervisor = psutil.Process(served.process.pid)
    workers = [p for p in supervisor.children(recursive=True) if "workers.expert_worker" in p.cmdline()]
    supervisor.suspend()  # it would replace them
    for process in workers:  # so that the answer does not end by itself
        process.suspend()
    try:
        ask(page, "What is a list?")
        wait_until(page, "!document.getElementById('stop').hidden")
        page.keyboard.press("Escape")
        wait_until(page, "document.querySelector('.note').innerText.includes('stopped')")
        assert page.is_visible("#send")
    finally:
        for process in workers:
            process.resume()
        supervisor.resume()


def test_an_answer_is_shown_as_text_and_fits_a_narrow_window(page: Any) -> None:
    deltas = [{"reasoning_content": "They ask."}, *({"content": part} for part in ANSWER)]
    usage = {"prompt_tokens": 9, "completion_tokens": 90, "prompt_tokens_details": {"cached_tokens": 4}}
    events: list[Any] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    ask(page, "What is a list?")
    wait_until(page, "document.querySelector('.note')?.innerText.includes('cut at')")
    assert "prompt of 9, 4 of them" in notes(page)[0]
    assert page.inner_text(".text pre") == ANSWER.split("```")[1].removeprefix("python\n").removesuffix("\n")
    assert page.inner_text(".text strong") == "list"
    assert page.locator(".text p").last.inner_text() == ANSWER.rpartition("\n")[2]
    assert page.locator("img, #log script").count() == 0
    assert page.title() != "run"
    assert not page.is_visible(".thinking div")  # folded
    page.click(".thinking summary")
    assert page.inner_text(".thinking div") == "They ask."
    assert page.evaluate("document.documentElement.scrollWidth") == 380


def test_a_refusal_is_shown_and_tried_again_with_a_key(page: Any) -> None:
    given: list[Any] = []

    def refuse(route: Any) -> None:
        given.append(route.request)
        status, text = (503, "the engine is not ready") if len(given) == 1 else (401, "an API key is needed")
        if len(given) < 3:
            route.fulfill(status=status, body=json.dumps({"error": {"message": text}}))
        else:
            route.continue_()

    page.route("**/v1/chat/completions", refuse)
    page.click("#settings summary")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    ask(page, "What is a list?")
    page.click("text=Try again")
    page.fill("[name=key]", "k" * 20)
    page.keyboard.press("Enter")
    wait_until(page, "/tok.s/.test(document.querySelector('.note').innerText)")
    assert given[2].headers["authorization"] == f"Bearer {'k' * 20}"
    assert given[2].post_data_json["messages"][0] == {"role": "system", "content": "Be brief."}
    assert given[2].post_data_json["temperature"] == 0.5
    assert page.locator(".answer").count() == page.locator(".question").count() == 1


SHOWN = """async (texts) => {
    const { show } = await import('/web/blocks.js');
    const element = document.createElement('div');
    texts.forEach((text) => show(element, text));
    const text = (e) => (e.querySelector('pre') ?? e).textContent;
    return [...element.children].map((e) => [e.tagName, e.className, text(e)]);
}"""


@pytest.mark.parametrize(
    ("texts", "blocks"),
    [
        # As tokens come, a line may look like a fence and be none.
        (["Use\n```", "Use\n```pip x", "Use\n```pip x```"], [["P", "", "Use\npip x"]]),
        (["# Head\nbelow"], [["P", "heading", "Head"], ["P", "", "below"]]),
        (
            ["10. run\n    ```sh\n    if a; then\n      b\n  fi\n\n    ```\nend"],
            [["P", "", "10. run"], ["FIGURE", "", "if a; then\n  b\nfi\n"], ["P", "", "end"]],
        ),
    ],
)
def test_blocks_of_markdown(page: Any, texts: list[str], blocks: list[list[str]]) -> None:
    assert page.evaluate(SHOWN, texts) == blocks


# --- the dashboard --------------------------------------------------------------------------------------


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


def frames(page: Any) -> int:
    return int(page.get_attribute("#experts", "data-frames") or 0)


def wait_for_frames(dashboard: Any, more: int) -> None:
    known = frames(dashboard)
    wait_until(dashboard, f"+document.getElementById('experts').dataset.frames >= {known + more}")


def test_page_is_live_while_an_answer_runs(dashboard: Any, served: Any) -> None:
    with answering(served.url):
        dashboard.wait_for_selector("#state[data-state=up]")
        wait_until(dashboard, "+document.getElementById('decode').textContent > 0")
        wait_for_frames(dashboard, 3)
        assert "all-host" in dashboard.inner_text("#policy")
        assert "A step takes" in dashboard.inner_text("#why")
        assert dashboard.inner_text("#hits") == "n/a"  # nothing is resident under this policy
        wait_until(
            dashboard, "document.getElementById('experts').clientHeight > 8 * 15"
        )  # it has rows to read


def test_page_goes_on_after_the_engine_is_killed(dashboard: Any, served: Any) -> None:
    with answering(served.url):
        wait_until(dashboard, "+document.getElementById('decode').textContent > 0")
        supervisor = psutil.Process(served.process.pid)
        supervisor.suspend()  # so that the restart waits until the page has shown the loss
        try:
            served.child("pipeline.coordinator").kill()
            dashboard.wait_for_selector("#state[data-state=away]")
        finally:
            supervisor.resume()
        wait_until(dashboard, "/restarted once/.test(document.getElementById('state').innerText)")
        wait_for_frames(dashboard, 3)


def test_other_machines_are_shown(dashboard: Any) -> None:
    """With what an engine on several machines would say: the fixture's has one."""
    step = {"steps": 0, "rows": 0, "fetched_bytes": 0, "active": 0, "hits": 0}
    parts = ("attention", "read", "plan", "submit", "device", "shared", "link", "wait", "combine", "head")
    scheduler = {"running": 1, "waiting": 0, "kv_tokens_used": 1, "kv_tokens_kept": 0, "kv_tokens": 9}
    b = {"name": "b", "state": "ready", "why": "", "share": 0.25, "round_trip_us": 812.4, "computing_us": 300}
    c = b | {"name": "c", "state": "away", "why": "the connection has ended"}

    def counters(second: int) -> str:
        spent = {"seconds": dict.fromkeys(parts, second / 10)}
        so_far = {"works": second, "waited_s": second / 5, "sent_bytes": 5e6 * second, "received_bytes": 0}
        said = {"policy": "all-host", "policy_options": {}, "prefetch": {"status": ""}, "time": second}
        said |= {"scheduler": scheduler, "phases": {"decode": step | spent, "prefill": step | spent}}
        return json.dumps(said | {"machines": [b | so_far, c | so_far]})

    body = "".join(f"event: counters\ndata: {counters(second)}\n\n" for second in (0, 1))
    dashboard.route("**/dashboard/events", lambda route: route.fulfill(body=body))
    dashboard.reload()
    rows = dashboard.locator("#machines tbody tr")
    rows.nth(1).wait_for()
    assert rows.all_inner_texts() == [
        "b\t25 %\t812 µs\t300 µs\t10 %\t5.0 MB/s\t0 B/s",
        "c\taway: the connection has ended",
    ]
    dashboard.set_viewport_size({"width": 380, "height": 700})
    assert dashboard.evaluate("document.documentElement.scrollWidth") == 380


def test_files_allow_nothing_from_elsewhere(served: Any) -> None:
    with served.http() as http:
        for path in ("/", "/dashboard", "/dashboard/", "/web/chat.js"):
            policy = http.get(path).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
        assert http.get("/dashboard").text == http.get("/dashboard/").text != http.get("/").text
        assert http.get("/web/dashboard.js").headers["content-type"].startswith("text/javascript")
        for path in ("/web/no.js", "/web/../app.py", "/web/%2e%2e/app.py", "/web/"):
            assert http.get(path).status_code == 404


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
