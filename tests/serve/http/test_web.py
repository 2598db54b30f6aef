"""The playground in a real browser: headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import running

from shoestring.serve import DraftModel

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


class Browser:
    """Chromium's own protocol: JSON messages that end with a zero byte, on the descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        assert CHROMIUM is not None
        # The browser wants its pipe on 3 and 4; a shell puts it there.
        flags = f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir={profile}"
        command = f'exec "{CHROMIUM}" {flags} --remote-debugging-pipe 3<&{to_read} 4>&{from_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=[to_read, from_write], stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        self._rest, self._id, self._session = b"", 0, None
        self.failures: list[Any] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.failures.append(answer["params"])
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def run(self, code: str) -> Any:
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, code: str, seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < end, f"never true: {code}; page: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; install chromium to test the playground")
    started = Browser(tmp_path / "profile")
    yield started
    started.close()


def shows_acceptance(service: Any) -> str:
    """JavaScript that is true when the page shows the engine's acceptance, which with this drafter is high."""
    stats = service.engine.stats
    share = 100 * stats.num_accepted / stats.num_drafted
    assert 50 < share <= 100, stats
    return f"Math.abs(parseInt($('accepted').textContent) - {share}) <= 0.5"


@pytest.mark.slow
def test_the_playground_chats_streams_stops_and_shows_errors(browser: Browser, tmp_path: Path) -> None:
    with running(api_keys=("secret",), max_requests=8) as service:
        service.engine.drafting.drafter = DraftModel(service.engine.model)  # guesses well
        service.engine.commit.eos_ids = set()
        browser.call("Page.navigate", url=service.url + "/")
        browser.wait_for("document.readyState === 'complete' && !!document.getElementById('model')")
        browser.wait_for("document.getElementById('model').textContent.includes('API key')")
        assert browser.failures == [] and not browser.run("$('key-field').hidden")  # nothing was called in vain
        browser.run("$('key').value = 'secret'; $('max_tokens').value = 12; $('seed').value = 5")
        browser.wait_for("$('model').textContent.startsWith('tiny, context 4096')")
        browser.run("$('text').value = 'Hello <b>you</b>'; $('tokens').open = true; countTokens()")
        browser.wait_for("$('pieces').textContent.includes('Hello <b>you</b>')")
        assert browser.run("$('count').textContent").endswith(" of 4096")
        browser.run("$('ask').requestSubmit()")
        browser.wait_for("document.querySelectorAll('.assistant:not(.writing)').length === 1")
        assert browser.run("document.querySelector('.user .body').innerHTML") == "Hello &lt;b&gt;you&lt;/b&gt;"
        assert browser.run("document.querySelector('.assistant .body').textContent.length") > 0
        facts = browser.run("document.querySelector('.assistant .facts').textContent")
        assert "+ 12 tokens" in facts and "length" in facts and "tok/s" in facts
        browser.wait_for(shows_acceptance(service))
        browser.wait_for("$('kv-text').textContent === '0%' && $('kv').value === 0")

        # The same question again: the seed decides, so the answer is the same, and the chat is no longer than before.
        wrote = "document.querySelector('.assistant .body').textContent"
        before = browser.run(wrote)
        browser.run("document.querySelector('.again').click()")
        browser.wait_for("document.querySelectorAll('.assistant:not(.writing)').length === 1 && !running")
        assert browser.run(wrote) == before and browser.run("chat.length") == 2

        # A long answer is stopped in the middle, and the engine stops working on it.
        browser.run("$('max_tokens').value = 4000; $('text').value = 'More'; $('ask').requestSubmit()")
        browser.wait_for("document.querySelectorAll('.assistant .body')[1].textContent.length > 20")
        browser.wait_for("$('running').textContent === '1' && Number($('rate').textContent) > 0")
        browser.wait_for("document.querySelectorAll('.assistant .body .drafted').length > 5")
        assert not browser.run("$('drafts').hidden")
        # 8 texts of 4096 tokens fit, so this one takes some percent; number and bar are of the same moment.
        browser.wait_for("parseInt($('kv-text').textContent) >= 1")
        share, text = browser.run("[$('kv').value, $('kv-text').textContent]")
        assert 0.005 <= share <= 1 / 8 and text == f"{int(100 * share + 0.5)}%"
        browser.screenshot(Path(os.environ.get("SHOESTRING_SCREENSHOT", tmp_path / "playground.png")))
        browser.run("$('stop').click()")
        browser.wait_for("document.querySelectorAll('.assistant:not(.writing)').length === 2")
        assert "stopped by you" in browser.run("document.querySelectorAll('.assistant .facts')[1].textContent")
        browser.wait_for("$('running').textContent === '0'")
        assert service.client.num_open == 0
        browser.wait_for("$('kv-text').textContent === '0%' && $('kv').value === 0")
        browser.wait_for(shows_acceptance(service))

        assert browser.failures == []
        browser.run("$('stops').value = 'x'.repeat(9999); $('text').value = 'Hi'; $('ask').requestSubmit()")
        browser.wait_for("document.querySelector('.error .body')?.textContent.startsWith('stop must be')")


HOSTILE = """# A **title**

Text with `code <b>`, *stress* and [a link](https://example.org/x), [not one](javascript:alert(1)).

```python
print("<script>alert(1)</script>")
```
- one
- two
  - inner

> quoted <img src=x onerror=alert(1)>

1. first
2. second

```
open to the end"""


@pytest.mark.slow
def test_markdown_is_rendered_and_never_parsed_as_html(browser: Browser) -> None:
    with running(max_requests=1) as service:
        browser.call("Page.navigate", url=service.url + "/")
        browser.wait_for("document.readyState === 'complete' && typeof markdown === 'function'")
        assert browser.run("$('key-field').hidden")
        browser.run(f"window.box = document.createElement('div'); box.append(markdown({json.dumps(HOSTILE)}))")
        html = browser.run("box.innerHTML")
        assert "<h3>A <strong>title</strong></h3>" in html and "<code>code &lt;b&gt;</code>" in html
        assert "<em>stress</em>" in html and 'href="https://example.org/x"' in html
        assert browser.run("box.querySelectorAll('a, img, script').length") == 1  # the one good link
        assert browser.run("box.querySelector('pre code').textContent") == 'print("<script>alert(1)</script>")'
        assert browser.run("[...box.querySelectorAll('li')].map((e) => e.firstChild.textContent).join()").startswith(
            "one,"
        )
        assert browser.run("box.querySelectorAll('ol li').length") == 2 and "quoted &lt;img" in html
        assert browser.run("[...box.querySelectorAll('pre')].at(-1).textContent").endswith("open to the end")
        # Nothing that a model may write takes long.
        for text in ("*" * 30_000, "[" * 30_000, "`" * 30_000, "> " * 5_000, "- " * 5_000, "**a" * 9_000, "#" * 30_000):
            browser.run(f"window.began = performance.now(); markdown({json.dumps(text)})")
            took = browser.run("performance.now() - began")
            assert took < 2000, (text[:4], took)
        # A phone: settings are behind their button; and the theme is one of three.
        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert browser.run("getComputedStyle(document.querySelector('aside')).display") == "none"
        browser.run("$('settings').click()")
        assert browser.run("getComputedStyle(document.querySelector('aside')).display") == "block"
        browser.run("$('theme').click(); $('theme').click()")
        assert browser.run("getComputedStyle(document.documentElement).colorScheme") == "dark"
        assert browser.failures == []
