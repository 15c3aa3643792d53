"""The page of `stagewright report` in a real browser: clicks, keys, a phone, paper, no network.

Skipped where there is no Chromium, or no playwright to drive it (the extra `browser`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from extras import needed
from stagewright.numbers import quantity
from stagewright.program import traffic

playwright = needed("playwright.sync_api", "browser")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")

SETTINGS: dict[str, Any] = {
    **{"model": "llama3-8b", "layers": 8, "tp": 2, "pp": 4, "dp": 2, "seq_length": 1024},
    **{"global_batch_size": 16, "sequence_parallel": True},
}

PAGES: dict[str, dict[str, Any]] = {
    "fits": {
        **{"model": "llama3.1-70b", "tp": 8, "pp": 4, "dp": 2, "sequence_parallel": True},
        **{"zero": 1, "global_batch_size": 64, "hardware": "h100-sxm"},
    },
    "does not fit": {"model": "llama3.1-70b", "tp": 8, "dp": 2, "hardware": "h100-sxm"},
    "experts": {
        **{"model": "deepseek-v3", "layers": 12, "pp": 2, "dp": 32, "ep": 32, "zero": 1},
        **{"global_batch_size": 128, "hardware": "h100-sxm"},
    },
    "decode": {
        **{"model": "deepseek-v3", "mode": "decode", "tp": 8, "ep": 8, "hardware": "h200"},
        **{"weight_precision": "fp8", "batch_size": 64, "context_length": 8192, "etp": 1},
    },
    "disaggregated": {
        **{"model": "llama3.1-70b", "mode": "decode", "tp": 4, "prefill": "tp=8", "dp": 2},
        **{"batch_size": 32, "context_length": 4096, "hardware": "h200"},
    },
    "one rank": {"model": "gpt2", "hardware": "h100-sxm"},
    "1,024 ranks": {
        **{"model": "llama3.1-405b", "tp": 8, "pp": 16, "dp": 8, "sequence_parallel": True},
        **{"zero": 1, "global_batch_size": 256, "hardware": "h100-sxm"},
    },
    "no hardware": {"model": "llama3-8b", "tp": 2, "pp": 2, "dp": 2},
}


@pytest.fixture(scope="module")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Path] = {}
    for nth, (name, settings) in enumerate(PAGES.items()):
        found[name] = folder / f"{nth}.html"
        sw.report(settings["model"], found[name], **{k: settings[k] for k in [*settings][1:]})
    return found


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

    opened_files: set[str] = set()

    def open_(width: int = 1000, file: Path = page_file, **looks: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, offline=True, **looks
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda told: wrong.append(told.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        opened_files.add(file.as_uri())
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
    assert {url for url in asked if not url.startswith("data:")} == opened_files


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
        '[tabindex="0"], main .tools button:enabled, main .copy\')]'
        ".filter(e => e.checkVisibility()).length"
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
    picture = page.locator(".medium svg[data-held]").first
    picture.focus()
    line = page.locator(f"#at-{picture.get_attribute('data-held')}")
    peak = line.inner_text()
    found = sw.simulate(sw.Run(**SETTINGS), "h100-sxm")
    assert peak.startswith(quantity(found.memory_over_time[0].peak, "B"))
    assert "activations" in peak
    page.keyboard.press("Home")
    assert line.inner_text() != peak
    page.keyboard.press("p")
    assert line.inner_text() == peak
    picture.hover(position={"x": 700, "y": 100})
    assert line.inner_text() != peak


def test_the_matrix_tells_who_sends(opened: Any):
    page = opened()
    picture = page.locator(".medium svg[data-matrix]").first
    picture.focus()
    line = page.locator(f"#at-{picture.get_attribute('data-matrix')}")
    assert line.inner_text() == "rank 0 sends itself nothing"
    page.keyboard.press("ArrowRight")
    sent = traffic.matrix(sw.compile(sw.Run(**SETTINGS)).program).bytes[0, 1]
    assert line.inner_text() == f"rank 0 sends rank 1 {quantity(round(sent), 'B')}"


# ---- charts on every screen ----------------------------------------------------------------------

CHARTS = """() => [...document.querySelectorAll('.chart svg')].filter(e => e.checkVisibility())
  .map(svg => {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')]
      .filter(e => e.textContent.trim() && e.getBoundingClientRect().width)
      .map(e => [e.textContent, e.getBoundingClientRect()]);
    const meet = ([, a], [, b]) => a.left + 1 < b.right && b.left + 1 < a.right &&
      a.top + 2.5 < b.bottom && b.top + 2.5 < a.bottom;
    return {
      name: svg.getAttribute('aria-label'), left: frame.left, right: frame.right,
      scrolls: !!svg.closest('.natural'),
      outside: texts.filter(([, a]) => a.left < frame.left - 1 || a.right > frame.right + 1 ||
        a.top < frame.top - 1 || a.bottom > frame.bottom + 1).map(([words]) => words),
      overlaps: texts.flatMap((a, nth) => texts.slice(nth + 1).filter(b => meet(a, b))
        .map(b => a[0] + ' | ' + b[0])),
      smallest: Math.min(...texts.map(([, a]) => a.height), 99),
    };
  })"""


def check_charts(page: Any, width: int, *, paper: bool = False) -> None:
    charts = page.evaluate(CHARTS)
    assert len(charts) >= 4
    for chart in charts:
        assert chart["overlaps"] == [], chart["name"]
        assert chart["outside"] == [], chart["name"]
        # Pixels of a line of text; a graph that a screen scrolls is made to fit a page of paper.
        least = 9 if not paper else 6 if chart["scrolls"] else 8.5
        assert chart["smallest"] >= least, chart["name"]
        if not chart["scrolls"]:
            assert chart["left"] >= 0, chart["name"]
            assert chart["right"] <= width, chart["name"]


@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("looks", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_charts_fit_and_can_be_read(
    opened: Any, page_files: dict[str, Path], name: str, width: int, looks: str
):
    page = opened(width, page_files[name], color_scheme=looks)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_charts(page, width)
    for tab in page.get_by_role("tab").all():
        tab.click()
    check_charts(page, width)


def test_a_desk_is_used(opened: Any, page_files: dict[str, Path]):
    page = opened(1400, page_files["fits"])
    drawn = [c for c in page.evaluate(CHARTS) if "Timeline" in c["name"]]
    assert drawn[0]["right"] - drawn[0]["left"] > 0.85 * 1400


def test_what_scrolls_says_so(opened: Any, page_files: dict[str, Path]):
    assert opened(390, page_files["fits"]).locator(".scrolls").first.is_visible()
    assert not opened(1400, page_files["fits"]).locator(".scrolls").first.is_visible()


def test_bars_tell_their_values(opened: Any):
    page = opened(1400)
    page.locator(".wide svg.bars .marks rect").first.hover()
    assert re.fullmatch(r"mean GPU: forward [\d.]+%", page.locator("#tip").inner_text())


def test_bars_tell_their_values_without_a_script(opened: Any):
    page = opened(1400, java_script_enabled=False)
    titles = page.locator(".wide svg.bars .marks rect title")
    assert titles.count() > 10
    assert re.fullmatch(r"mean GPU: forward [\d.]+%", titles.first.text_content())


def test_the_timeline_tells_what_runs(opened: Any):
    page = opened(1400)
    picture = page.locator(".wide svg.timeline")
    told: list[str] = []
    for x in range(560, 640, 8):  # between kernels a rank waits: for others, or for its host
        picture.hover(position={"x": x, "y": 60})
        told.append(page.locator("#tip").inner_text())
    assert all(each.startswith("stage 0 at ") for each in told)
    assert any(re.match(r"stage 0 at [\d.]+ m?s: (forward|backward) \d", each) for each in told)
    picture.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowDown")
    assert page.locator("#at-timeline").inner_text().startswith("stage 1 at ")


def ticks(picture: Any) -> list[str]:
    return picture.locator(".ticks text").all_text_contents()


@pytest.mark.parametrize("kind", ["timeline", "bars"])
def test_charts_zoom(opened: Any, kind: str):
    page = opened(1400)
    picture = page.locator(f".wide svg.{kind}").first
    figure = picture.locator("xpath=ancestor::figure")
    whole, drawn = ticks(picture), picture.inner_html()
    figure.get_by_role("button", name="Zoom in").click()
    assert ticks(picture) != whole
    figure.get_by_role("button", name="Show all").click()
    assert ticks(picture) == whole
    if kind == "bars":
        assert re.sub(r' style=""', "", picture.inner_html()) == drawn
    picture.evaluate("each => each.scrollIntoView({block: 'center', behavior: 'instant'})")
    box = picture.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 400, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, y, steps=4)
    page.mouse.up()
    assert "0" not in ticks(picture)
    assert figure.get_by_role("button", name="Zoom out").is_enabled()
    check_charts(page, 1400)
    page.mouse.dblclick(box["x"] + 400, y)
    assert ticks(picture) == whole


def test_the_command_can_be_copied(opened: Any):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    pasted = page.evaluate("navigator.clipboard.readText()")
    assert pasted.startswith("stagewright ")
    assert pasted == page.locator("pre.command code").inner_text()


def test_what_does_not_fit_is_said_first(opened: Any, page_files: dict[str, Path]):
    page = opened(1400, page_files["does not fit"])
    assert "does not fit" in page.locator("h1").inner_text()
    assert "220 GB" in page.locator(".verdict").inner_text()
    card = page.locator(".cards div").first
    assert card.get_attribute("class") == "problem"
    assert "Peak memory" in card.inner_text()
    grey = page.evaluate("getComputedStyle(document.querySelector('.cards .moot dd')).color")
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert grey != ink
    assert opened(1400, page_files["fits"]).locator(".moot, .verdict").count() == 0


def pages_of(path: Path) -> int:
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", path.read_bytes()))


@pytest.mark.parametrize("paper", ["A4", "Letter"])
@pytest.mark.parametrize("name", ["fits", "does not fit"])
def test_paper_is_at_most_eight_pages(
    opened: Any, page_files: dict[str, Path], tmp_path: Path, name: str, paper: str
):
    page = opened(1400, page_files[name])
    page.pdf(path=tmp_path / "run.pdf", format=paper, print_background=True)
    assert 2 <= pages_of(tmp_path / "run.pdf") <= 8
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})
    check_charts(page, 700, paper=True)
    for only_on_screen in (".hint", ".tools", ".copy", "nav", ".scrolls"):
        assert not page.locator(only_on_screen).first.is_visible()
    assert "@top-left" in page.content()


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
