"""The page of `stagewright report` in a real browser: clicks, keys, a phone, paper, no network.

Skipped where there is no Chromium, or no playwright to drive it (the extra `browser`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from extras import needed
from stagewright.numbers import quantity
from stagewright.time import traffic

playwright = needed("playwright.sync_api", "browser")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")

SETTINGS: dict[str, Any] = {
    **{"model": "llama3-8b", "layers": 8, "tp": 2, "pp": 4, "dp": 2, "seq_length": 1024},
    **{"global_batch_size": 16, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "run.html"
    sw.report(sw.Run(**SETTINGS), path, hardware="h100-sxm")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Any]:
    """Opens the page; at the end, nothing has gone wrong and nothing was asked of any network."""
    wrong: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def open_(width: int = 1000, **looks: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, offline=True, **looks
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda told: wrong.append(told.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
    assert {url for url in asked if not url.startswith("data:")} == {page_file.as_uri()}


def shown(page: Any, name: str) -> list[bool]:
    """Which panels of some tabs are to be seen."""
    count = page.locator(f"[id^='{name}-tab-']").count()
    return [page.locator(f"#{name}-{nth}").is_visible() for nth in range(count)]


def test_a_click_shows_another_tab(opened: Any):
    page = opened()
    assert shown(page, "over-time") == [True, False, False, False]
    page.get_by_role("tab", name="stage 2").click()
    assert shown(page, "over-time") == [False, False, True, False]
    page.get_by_role("tab", name="pp", exact=True).click()
    assert shown(page, "matrix").count(True) == 1


def test_tabs_take_keys(opened: Any):
    page = opened()
    page.get_by_role("tab", name="stage 0").focus()
    for key, at in (
        ("ArrowRight", 1),
        ("End", 3),
        ("ArrowRight", 0),
        ("ArrowLeft", 3),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert shown(page, "over-time").index(True) == at
        focused = page.evaluate("document.activeElement.id")
        assert focused == f"over-time-tab-{at}"


def test_all_can_be_reached_by_the_tab_key(opened: Any):
    """The link that skips comes first; what can be opened or moved in is stopped at, once."""
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    stops: list[str] = []
    for _ in range(200):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            "(e => e === document.body ? '' : e.tagName + ' ' + (e.id || e.textContent.slice(0, 60)"
            " || e.getAttribute('aria-label')))(document.activeElement)"
        )
        if not stop:
            break
        stops.append(stop)
    wanted = page.evaluate(
        "[...document.querySelectorAll('main summary, main svg[tabindex], main [role=tab]"
        '[tabindex="0"]\')].filter(e => e.checkVisibility()).length'
    )
    kinds = [stop.split()[0] for stop in stops]
    assert kinds.count("SUMMARY") + kinds.count("svg") + kinds.count("BUTTON") == wanted
    assert wanted >= 10


def test_details_open_by_key(opened: Any):
    page = opened()
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.locator("details").first.locator("table").is_visible()


def test_memory_tells_what_is_held(opened: Any):
    page = opened()
    picture = page.locator("svg[data-held]").first
    picture.focus()
    line = page.locator(f"#at-{picture.get_attribute('data-held')}")
    peak = line.inner_text()
    found = sw.simulate(sw.Run(**SETTINGS), "h100-sxm")
    assert peak.startswith(quantity(found.memory[0].peak, "B"))
    assert "activations" in peak
    page.keyboard.press("Home")
    assert line.inner_text() != peak
    page.keyboard.press("p")
    assert line.inner_text() == peak
    picture.hover(position={"x": 700, "y": 100})
    assert line.inner_text() != peak


def test_the_matrix_tells_who_sends(opened: Any):
    page = opened()
    picture = page.locator("svg[data-matrix]").first
    picture.focus()
    line = page.locator(f"#at-{picture.get_attribute('data-matrix')}")
    assert line.inner_text() == "rank 0 sends itself nothing"
    page.keyboard.press("ArrowRight")
    sent = traffic.matrix(sw.compile(sw.Run(**SETTINGS)).program).bytes[0, 1]
    assert line.inner_text() == f"rank 0 sends rank 1 {quantity(round(sent), 'B')}"


@pytest.mark.parametrize("width", [320, 380, 768, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int, dark: bool):
    page = opened(width, color_scheme="dark" if dark else "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "w => [...document.querySelectorAll('h1,h2,h3,p,li:not(nav li),summary,button,figcaption')]"
        ".filter(e => e.getBoundingClientRect().right > w + 0.5).map(e => e.textContent)",
        width,
    )
    assert outside == []


def test_paper_has_all_panels_and_tables(opened: Any, tmp_path: Path):
    page = opened()
    page.screenshot(path=tmp_path / "report.png", full_page=True)
    page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "report.png").stat().st_size > 50_000
    page.emulate_media(media="print")
    assert all(shown(page, "over-time"))
    assert not page.locator("nav").is_visible()


def test_without_a_script_all_is_there(opened: Any):
    page = opened(java_script_enabled=False)
    assert page.locator("[role=tabpanel]").count() > 4
    for panel in page.locator("[role=tabpanel]").all():
        assert panel.is_visible()
    assert not page.locator("[role=tablist]").first.is_visible()


CONTRAST = """() => {
  const rgb = text => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, nth) => sum + v * [0.2126, 0.7152, 0.0722][nth], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('h1,h2,p,a,b,dt,dd,small,th,td,summary,figcaption,button')]
    .map(e => {
      const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + ' ' + e.textContent];
    }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("looks", ["light", "dark"])
def test_text_stands_out(opened: Any, looks: str):
    """A contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""
    assert opened(color_scheme=looks).evaluate(CONTRAST) == []
