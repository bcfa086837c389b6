"""The dashboard in a real browser: Chromium without a screen, by its own driver."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from harness.clients import Redis
from harness.kip import Kip, daemon
from harness.wait import wait_for
from test_api import free_port, local

REDIS = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""]
STAYS = ["--idle", "1h", "--park-after", "1h"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    profile = tmp_path_factory.mktemp("chromium")
    # The tests are root, for which Chromium has no sandbox; what it loads is ours.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--no-first-run"):
        options.add_argument(flag)
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


@dataclass
class Page:
    """The page of a daemon, opened."""

    browser: webdriver.Chrome
    kip: Kip
    url: str

    def open(self, token: str | None) -> None:
        self.browser.get(self.url)
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.get(self.url)
        if token:
            field = wait_for("it asks for a token", lambda: self.shown("#token"), 20)
            field.send_keys(token, Keys.ENTER)

    def shown(self, selector: str) -> Any:
        found = [e for e in self.browser.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]
        return found[0] if found else None

    def run(self, script: str, *words: str) -> Any:
        return self.browser.execute_script(f"return {script}", *words)

    def text(self, selector: str) -> str:
        return self.run("document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("[...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def click(self, selector: str) -> None:
        """By script: what is clicked may be drawn anew at any moment."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def cells(self, name: str) -> list[str]:
        return self.texts(f"tr[data-proc='{name}'] td")

    def total(self, label: str) -> str:
        return self.text(f"[data-total='{label}'] b")

    def picture(self, name: str) -> None:
        """For looking at the page: KIP_PICTURES names a directory."""
        if directory := os.environ.get("KIP_PICTURES"):
            self.browser.save_screenshot(f"{directory}/{name}.png")


@pytest.fixture(scope="module")
def served(browser: webdriver.Chrome) -> Iterator[tuple[Page, str]]:
    port = free_port()
    with daemon("--listen", f"127.0.0.1:{port}", "--listen-plain") as kip:
        token = kip.json("token", "create", "look", "--scope", "read")["token"]
        yield Page(browser, kip, f"http://127.0.0.1:{port}/"), token


@pytest.fixture
def page(served: tuple[Page, str]) -> Iterator[Page]:
    page, token = served
    page.browser.get_log("browser")
    page.browser.set_window_size(1200, 1000)
    page.open(token)
    # Its first question was without a token.
    wait_for("it shows something", lambda: page.shown("#main"), 20)
    page.browser.get_log("browser")
    yield page
    complaints = [line["message"] for line in page.browser.get_log("browser") if line["level"] == "SEVERE"]
    page.kip.remove_all()
    assert not complaints, complaints


# promise api: a page by TCP over the API: procs by tier, memory held and saved, in a real
#   Chromium; at 400 pixels nothing scrolls sideways, and tier and state of each proc are seen
def test_it_shows_what_is(page: Page) -> None:
    assert page.shown("#none"), "what to do where there is no proc"
    kip = page.kip
    hot, hibernated, parked = (kip.run(name, REDIS, ports=["6379"], flags=STAYS) for name in ("hot", "hibernated", "parked"))
    hibernated.hibernate()
    parked.sleep()
    wakes = [p.inspect()["wakes"] for p in (hot, hibernated, parked)]
    wait_for("all are there", lambda: len(page.texts("tbody tr")) == 3, 20)
    want = {"hot": ["hot", "running"], "hibernated": ["hibernated"] * 2, "parked": ["parked"] * 2}
    wait_for("each in its tier", lambda: {name: page.cells(name)[1:3] for name in want} == want, 20)
    counts = ("hot", "hibernated", "parked", "archived")
    wait_for("the totals are right", lambda: [page.total(tier) for tier in counts] == ["1", "1", "1", "0"], 20)
    assert page.total("memory saved").endswith("iB") and page.total("memory held").endswith("iB")
    drawn = page.run("[...document.querySelectorAll('#tiers path')].map(p => p.dataset.now)")
    assert drawn == ["1", "1", "1", "0", "0"], "as many as there are, each in its place"
    for order in (["hot", "hibernated", "parked"], ["parked", "hibernated", "hot"]):
        page.click("[data-sort=tier]")
        assert page.texts("tbody tr td:first-child") == order
    assert not page.shown("#login")
    page.picture("wide")
    assert [p.inspect()["wakes"] for p in (hot, hibernated, parked)] == wakes, "nobody was woken"
    page.browser.set_window_size(400, 900)
    wide, inner = page.run("[document.documentElement.scrollWidth, window.innerWidth]")
    wait_for("it is drawn anew", lambda: page.run("document.querySelector('#tiers svg').viewBox.baseVal.width") < 400, 20)
    page.run("document.querySelector('#procs').scrollIntoView({ block: 'center' })")
    page.picture("narrow")
    assert wide <= inner
    table, room = page.run("[document.querySelector('#procs').scrollWidth, document.querySelector('.wide').clientWidth]")
    assert table <= room, "the table fits, too"
    for name, (tier, state) in want.items():
        row = page.browser.find_elements(By.CSS_SELECTOR, f"tr[data-proc={name}] td")
        seen = [cell.text for cell in row if cell.is_displayed()]
        assert seen == [name, tier, state], "what a narrow screen keeps"


# promise api: a proc that does not run says how its program ended, never that it sleeps
def test_it_says_how_a_program_ended(page: Page) -> None:
    kip = page.kip
    for name, command in (("well", "exit 0"), ("badly", "echo last words >&2; exit 3"), ("killed", "kill -9 $$")):
        kip.cli("run", "--name", name, "--", "sh", "-c", command)
    kip.run("asleep", ["sleep", "1000"], flags=STAYS).sleep()
    wait_for("all are told", lambda: page.cells("killed")[1:3] == ["none", "failed, signal 9"], 20)
    assert page.cells("well")[1:3] == ["none", "exited, code 0"]
    assert page.cells("badly")[1:3] == ["none", "failed, code 3"]
    page.click("tr[data-proc=badly] a")
    wait_for("why it is so", lambda: page.texts("#why li") == ["it does not run; kip start badly starts it"], 20)
    wait_for("its last words are there", lambda: page.text("#one-logs .stderr") == "last words\n", 20)
    assert "exit code 3" in page.text("#one-facts") and page.text("#one-state") == "failed, code 3"
    page.picture("stopped")
    page.click("tr[data-proc=asleep] a")
    wait_for("a sleeper says what will wake it", lambda: any("its next wake is by" in line for line in page.texts("#why li")), 20)


# promise api: a row of the page is a link with an address of its own, by mouse, keyboard and
#   history; procs are found by a word, a tier and a state
def test_it_finds_and_leads(page: Page) -> None:
    kip = page.kip
    for name in ("cache-1", "cache-2"):
        kip.run(name, REDIS, ports=["6379"], flags=STAYS)
    kip.run("other", ["sleep", "1000"], flags=STAYS).sleep()
    rows = lambda: page.texts("tbody tr td:first-child")  # noqa: E731
    wait_for("all are there", lambda: rows() == ["cache-1", "cache-2", "other"], 20)
    assert str(kip.json("inspect", "cache-1")["ports"][0]["host_port"]) in page.cells("cache-1")[3]

    def choose(field: str, word: str) -> None:
        page.run("(f => { f.value = arguments[1]; f.dispatchEvent(new Event('input')); })(document.querySelector(arguments[0]))", field, word)

    for field, word, found in (("#search", "REDIS 6379", 2), ("#by-tier", "parked", 1), ("#by-state", "running", 2), ("#search", "nothing", 0)):
        choose(field, word)
        assert len(rows()) == found and page.text("#found") == f"{found} of 3", word
        choose(field, "")
    assert len(rows()) == 3
    # By keyboard: the link has the focus, which is seen, and keeps it while all is drawn anew.
    page.run("document.querySelector('[data-sort=command]').focus()")
    focused = lambda: page.run("document.activeElement.dataset.link ?? document.activeElement.id")  # noqa: E731
    page.browser.switch_to.active_element.send_keys(Keys.TAB)
    assert focused() == "cache-1"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    kip.run("another", ["sleep", "1000"])
    wait_for("it is drawn anew", lambda: len(rows()) == 4, 20)
    assert focused() == "cache-1"
    page.picture("focus")
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait_for("it is open", lambda: page.shown("#one"), 20)
    assert page.browser.current_url == f"{page.url}#proc/cache-1" and focused() == "one-name"
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.shown("#one") and focused() == "cache-1"
    page.browser.back()
    wait_for("the way back leads to it", lambda: page.shown("#one") and page.text("#one-name") == "cache-1", 20)
    page.browser.refresh()
    wait_for("its address leads to it", lambda: page.shown("#one") and page.text("#one-name") == "cache-1", 20)


DRAWN = """[...document.querySelectorAll('#tiers path')].map(p => p.getAttribute('d').slice(1, -1).split('L').map(at => +at.split(' ')[1]))"""


def heights(page: Page) -> dict[str, list[float]]:
    """How high each tier is drawn, look by look: the upper line of its area, and then the lower one backwards."""
    drawn = {}
    for tier, ys in zip(("hot", "hibernated", "parked", "archived", "stopped"), page.run(DRAWN), strict=True):
        looks = len(ys) // 2
        drawn[tier] = [round(low - high, 1) for high, low in zip(ys[:looks], reversed(ys[looks:]), strict=True)]
    return drawn


# promise api: procs by tier over time: who was hot at an earlier look is drawn so there
def test_it_shows_what_was(page: Page) -> None:
    """Tiers over time: a proc that was hot at an earlier look is drawn so there, and asleep now."""
    proc = page.kip.run("then", REDIS, ports=["6379"], flags=STAYS)
    kept = lambda: json.loads(local(page.kip, "GET", "/v1/history")[2])["samples"][:-1]  # noqa: E731  the last one is now
    seen = wait_for("it was looked at by itself", lambda: [s for s in kept() if s["hot"] == 1], 40)
    proc.hibernate()
    wait_for("it is drawn asleep", lambda: heights(page)["hibernated"][-1] > 0, 30)
    drawn = heights(page)
    assert drawn["hot"][-1] == 0 and any(height > 0 for height in drawn["hot"][:-1]), (drawn, seen)


BROKEN = """
let left = 4;
const real = window.fetch;
window.fetch = (...words) => left-- > 0 ? Promise.reject(new TypeError("nobody there")) : real(...words);
"""


# promise api: a daemon that cannot be asked at first is asked again until it can
def test_a_daemon_that_is_not_there_at_first_is_tried_again(page: Page) -> None:
    broken = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": BROKEN})
    try:
        page.browser.get(page.url)
        wait_for("it says what it does", lambda: "trying again" in page.text("#trouble"), 20)
        wait_for("it has tried again", lambda: page.shown("#main") and not page.shown("#trouble"), 30)
        page.kip.run("after", ["sleep", "1000"])
        wait_for("it follows", lambda: page.cells("after"), 20)
    finally:
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", broken)


# promise api: it follows what happens without being loaded again; a wake is shown step by step, and
#   why a proc is awake; no proc is woken
def test_it_follows_and_explains(page: Page) -> None:
    proc = page.kip.run("cache", REDIS, ports=["6379"], flags=STAYS)
    client = Redis(proc.port(6379))
    proc.sleep()
    wait_for("it is parked", lambda: page.cells("cache")[1:3] == ["parked", "parked"], 20)
    page.click("tr[data-proc=cache]")
    wait_for("it says what it waits for", lambda: page.texts("#why li") not in ([], ["looking ..."]), 20)
    assert page.text("#slept").startswith("to parked, frozen ")
    assert client.ask("PING") == "PONG"
    # Nothing is loaded again.
    wait_for("the wake is there", lambda: "from parked, for tcp" in page.text("#wake"), 20)
    assert page.cells("cache")[6] == str(proc.inspect()["wakes"])
    steps = page.run("[...document.querySelectorAll('#waterfall [data-us]')].map(e => [e.dataset.step, +e.dataset.us])")
    assert steps == [[step["name"], step["us"]] for step in proc.inspect()["last_wake"]["steps"]] and len(steps) > 3
    wait_for("why it is awake", lambda: any("ago" in line for line in page.texts("#why li")), 20)
    assert any("woken" in line for line in page.texts("#one-events li"))
    page.run("document.querySelector('#one').scrollIntoView()")
    page.picture("one")
    page.click("#close")
    assert not page.shown("#one")


# promise api: names, commands and events are text, whatever is in them; nothing is loaded
#   from elsewhere
def test_what_it_shows_is_text(page: Page) -> None:
    markup = '<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>'
    page.kip.cli("run", "--name", "markup", "--", "sh", "-c", f": '{markup}'; sleep 1000")
    wait_for("it is there", lambda: page.cells("markup"), 20)
    assert markup in page.cells("markup")[-1]
    page.click("tr[data-proc=markup]")
    wait_for("its events are there", lambda: any(markup in line for line in page.texts("#one-events li")), 20)
    assert page.run("window.hurt ?? 0") == 0
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    asked = page.run("performance.getEntriesByType('resource').map(r => r.name)")
    assert asked and all(url.startswith((page.url, "data:")) for url in asked), asked


# promise api: without a token, or with a wrong one, it shows nothing
def test_without_a_token_it_shows_nothing(served: tuple[Page, str]) -> None:
    page, _ = served
    page.open(None)
    wait_for("it asks for a token", lambda: page.shown("#token"), 20)
    assert not page.shown("#main")
    page.open("kip_0000")
    wait_for("it is refused", lambda: page.text("#refused"), 20)
    assert not page.shown("#main")
    port = int(page.url.rstrip("/").rpartition(":")[2])
    for path, status in (("/", 200), ("/dashboard.js", 200), ("/v1/procs", 401), ("/v1/history", 401), ("/dashboard.js/../v1/procs", 401)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == status, path
        if status == 200:
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        connection.close()
    page.browser.get_log("browser")


# promise api: a daemon that goes away and comes back is told, and shown again
def test_a_daemon_that_comes_back(page: Page) -> None:
    page.kip.kill()
    wait_for("it is told", lambda: page.shown("#trouble"), 30)
    page.kip.up()
    page.kip.run("later", ["sleep", "1000"])
    wait_for("it is shown again", lambda: page.cells("later") and not page.shown("#trouble"), 30)
    # What the browser says of refused connections is what was to be.
    page.browser.get_log("browser")
