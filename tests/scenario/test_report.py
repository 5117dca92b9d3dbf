"""The report in Chromium: no errors, no network, hostile text stays text, a rollout among 10,000 is there at
once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from made_run import made_run

from rollwright.events import Evaluated, EventLog, StepEnded
from rollwright.view.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.needs("chromium")

HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
    "</pre></textarea></title></script><svg/onload=window.pwned=3>{{ 7 * 7 }}&lt;b&gt;\"'`\u202e"
)
SECONDS = 1.0
"""The bar: a rollout of 10,000 is found and opened in at most this much time of the page."""


class Watched:
    """A page, and everything that it should not do."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda told: self.complaints.append(f"console: {told.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _asked(self, url: str) -> None:
        if not url.startswith("file:") or ".html" not in url:
            self.complaints.append(f"request: {url}")

    def open(self, path: Path, rollout: str = "") -> None:
        self.page.goto(path.as_uri() + (f"#rollout={quote(rollout, safe='')}" if rollout else ""))
        self.page.wait_for_selector("html[data-ready]")


@pytest.fixture(scope="module")
def chromium(chromium_path: Path) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    arguments = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
    ]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium_path, args=arguments)
        yield running
        running.close()


@pytest.fixture
def watched(chromium: Browser) -> Iterator[Watched]:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    yield Watched(page)
    page.close()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_run(tmp_path_factory.mktemp("big"), 10_000, size=20)
    written = write_report(folder)
    assert written.embedded == written.rollouts == 10_000
    assert written.size < 20e6
    return written.path


FIND_AND_OPEN = """async (id) => {
  const find = document.getElementById("find"), panel = document.getElementById("panel");
  const began = performance.now();
  find.value = id;
  find.dispatchEvent(new Event("input"));
  document.getElementById("filters").requestSubmit();
  const shown = () => panel.dataset.rollout === id && panel.querySelector(".tokens");
  while (!shown()) await new Promise(requestAnimationFrame);
  return (performance.now() - began) / 1000;
}"""


def test_one_of_ten_thousand_is_found_and_opened_at_once(watched: Watched, big: Path) -> None:
    watched.open(big)
    for id in ("0-g440/3.0", "0-g0/0.0", "0-after-sampled/499.0"):
        assert watched.page.evaluate(FIND_AND_OPEN, id) <= SECONDS
        assert watched.page.locator("#panel h2").inner_text() == id
    assert watched.complaints == []


def test_a_person_finds_sorts_pages_and_follows_links(watched: Watched, big: Path) -> None:
    page = watched.page
    watched.open(big)
    assert page.locator("#found").inner_text() == "10,000 rollouts"
    assert page.locator(".row.body").count() < 80  # only what is looked at is drawn
    page.fill("#find", "0-g41/")
    assert page.locator("#found").inner_text() == "20 of 10,000"
    page.click("[data-name=reward]")
    page.click("[data-name=reward]")
    page.press("#find", "Enter")
    page.wait_for_selector("#panel .tokens")
    first = page.locator("#panel h2").inner_text()
    assert first.startswith("0-g41/") and page.locator("#panel .chip").count() >= 20
    page.keyboard.press("j")
    page.wait_for_function("first => document.querySelector('#panel h2').textContent !== first", arg=first)
    page.locator("#panel .chip").filter(has_text=first).click()
    page.wait_for_function("first => document.querySelector('#panel h2').textContent === first", arg=first)
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden() and "#" not in page.url
    assert watched.complaints == []


def test_tokens_say_what_is_known_of_them(watched: Watched, big: Path) -> None:
    page = watched.page
    watched.open(big, "0-g3/1.0")
    page.wait_for_selector("#panel .tokens")
    assert "ütz" in page.locator("#panel .tokens").inner_text()  # bytes of one character, joined
    page.locator("#panel .tokens i.f1").first.hover()
    tip = page.locator("#tip").inner_text()
    for word in ("sampled", "probability", "logprob", "policy@0.", "advantage", "weight"):
        assert word in tip
    page.locator("#panel .tools button", has_text="advantage").click()
    assert page.locator("#panel .tokens i[class*=' a'], #panel .tokens i[class*=' d']").count() > 0
    shown = page.evaluate("[0, 1.5e-7, -2e-5, 0.0123, 1234.5, null].map((value) => Report.number(value))")
    assert shown == ["0", "1.5e-7", "-2e-5", "0.0123", "1,230", "–"]
    assert watched.complaints == []


def test_measurements_fit_into_a_page_of_1200_pixels(chromium: Browser, tmp_path: Path) -> None:
    folder = made_run(tmp_path, 320)
    events = EventLog(folder.events("trainer"))
    events.emit(StepEnded(step=1234, incarnation=1, metrics={}))
    for label in ("eval-1", "eval-12"):
        for mode in ("sampled", "greedy"):
            events.emit(
                Evaluated(label=label, mode=mode, successes=99, trials=1000, low=0.08, high=0.12, step=987)
            )
    events.close()
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    Watched(page).open(write_report(folder).path)
    widths = "all => all.map(each => [each.scrollWidth, each.clientWidth])"
    found = page.eval_on_selector_all(".scroll", widths)
    assert len(found) >= 2 and all(inside <= outside for inside, outside in found), found
    shown = "all => all.map(each => getComputedStyle(each).overflow)"  # a point at 0 % or 100 % is whole
    assert set(page.eval_on_selector_all("svg.interval", shown)) == {"visible"}
    page.close()


def test_curves_are_drawn_in_light_dark_and_narrow(chromium: Browser, big: Path) -> None:
    for scheme, width in (("light", 1280), ("dark", 400)):
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        watched = Watched(page)
        watched.open(big)
        assert page.locator("#charts canvas").count() >= 6
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("#charts .u-over").first.hover()
        page.wait_for_function("document.querySelector('#charts .u-legend').textContent.includes('[')")
        assert watched.complaints == []
        page.close()


def test_hostile_text_stays_text(watched: Watched, tmp_path: Path) -> None:
    path = write_report(made_run(tmp_path, 64, hostile=HOSTILE)).path
    page = watched.page
    watched.open(path, "0-g1/0.0")
    page.wait_for_selector("#panel .tokens")
    for summary in page.locator("summary").all():
        summary.evaluate("node => { node.parentElement.open = true; }")
    for mode in ("advantage", "source"):
        page.locator("#panel .tools button", has_text=mode).click()
    page.locator("#panel .tokens i.f2").first.hover()
    said = [f"#panel .say.{who} pre" for who in ("system", "user", "assistant", "call", "tool")]
    for selector in (*said, "#panel .tokens", "#examples", "#became", "#result"):
        assert "<script>window.pwned = 1</script>" in page.locator(selector).first.inner_text()
    assert "{{ 7 * 7 }}" in page.locator("#configuration").inner_text()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, iframe, object, embed, link, [onerror], [onload], [style*=url]").count() == 0
    assert watched.complaints == []


def test_the_policy_of_the_page_stops_what_would_slip_through(watched: Watched, tmp_path: Path) -> None:
    path = write_report(made_run(tmp_path, 32)).path
    page = watched.page
    watched.open(path)
    page.evaluate("""() => {
      document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.pwned = 1'>");
      const script = document.createElement("script");
      script.textContent = "window.pwned = 2";
      document.body.append(script);
    }""")
    assert page.evaluate("fetch('https://example.invalid/').then(() => 1, () => 0)") == 0
    assert page.evaluate("window.pwned") is None
    assert any("Content Security Policy" in complaint for complaint in watched.complaints)
    assert not any(complaint.startswith("request: http") for complaint in watched.complaints)


def test_runs_that_never_got_far_open_too(watched: Watched, tmp_path: Path) -> None:
    killed = write_report(made_run(tmp_path, 64, finished=False), rollouts=8)
    watched.open(killed.path, "0-before-sampled/1.0")
    assert watched.page.locator(".pill.stopped").count() == 1
    watched.page.wait_for_selector("#panel h2")
    watched.open(killed.path, "no-such")
    watched.page.reload()
    watched.page.wait_for_selector("html[data-ready]")
    assert "no rollout no-such" in watched.page.locator("#trouble").inner_text()
    assert watched.complaints == []
