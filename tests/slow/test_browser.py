"""Pages in a real browser: clicks, keys, a phone, paper, no network.

Skipped where there is no Chromium, or no playwright to drive it (the extra `browser`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import needed
from stagewright.numbers import quantity
from stagewright.views.pages.compare import compare_page

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


FEW: dict[str, Any] = {"layers": 4, "seq_length": 1024, "global_batch_size": 16}


def _search_page(path: Path) -> None:
    sw.search("llama3-8b", "h100-sxm", gpus=8, most=20, **FEW).write(path)


def _serving_page(path: Path) -> None:
    load = {"rate": 400, "isl": 2000, "osl": 60, "num_requests": 200, "ttft": 50, "tpot": 9}
    sw.serve("llama3.1-8b", "h100-sxm", layers=4, **load).write(path)


def _serving_search_page(path: Path) -> None:
    load = {"rate": 20, "isl": 500, "osl": 50, "num_requests": 200, "ttft": 500, "tpot": 30}
    sw.search_serving("llama3.1-8b", "h100-sxm", layers=4, gpus=8, **load).write(path)


def _comparison(path: Path) -> None:
    runs = {
        name: sw.simulate("llama3-8b", hardware, **FEW, **degrees)
        for name, hardware, degrees in (
            ("pipeline", "h100-sxm", {"pp": 2, "tp": 2}), ("sharded", "h200", {"dp": 4, "zero": 3}),
        )
    }  # fmt: skip
    page = compare_page({name: (step.compiled, step) for name, step in runs.items()})
    path.write_text(page, encoding="utf-8")


OTHER_PAGES: dict[str, Callable[[Path], None]] = {
    "search": _search_page,
    "serving": _serving_page,
    "serving search": _serving_search_page,
    "comparison": _comparison,
}


@pytest.fixture(scope="module")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Path] = {}
    for nth, (name, settings) in enumerate(PAGES.items()):
        found[name] = folder / f"{nth}.html"
        sw.report(settings["model"], found[name], **{k: settings[k] for k in [*settings][1:]})
    for name, write in OTHER_PAGES.items():
        found[name] = folder / f"{name}.html"
        write(found[name])
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
        '[tabindex="0"], main .copy\')]'
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
    picture = page.locator("svg[data-held]").first
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
      outside: texts.filter(([, a]) => a.left < frame.left - 1 || a.right > frame.right + 1 ||
        a.top < frame.top - 1 || a.bottom > frame.bottom + 1).map(([words]) => words),
      overlaps: texts.flatMap((a, nth) => texts.slice(nth + 1).filter(b => meet(a, b))
        .map(b => a[0] + ' | ' + b[0])),
      smallest: Math.min(...texts.map(([, a]) => a.height), 99),
    };
  })"""


def check_charts(page: Any, width: int, *, paper: bool = False) -> None:
    charts = page.evaluate(CHARTS)
    assert charts
    for chart in charts:
        assert chart["overlaps"] == [], chart["name"]
        assert chart["outside"] == [], chart["name"]
        assert chart["smallest"] >= (8 if paper else 9), chart["name"]  # pixels of a line of text
        assert chart["left"] >= 0, chart["name"]
        assert chart["right"] <= width, chart["name"]


@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("looks", ["light", "dark"])
@pytest.mark.parametrize("name", [*PAGES, *OTHER_PAGES])
def test_charts_fit_and_can_be_read(
    opened: Any, page_files: dict[str, Path], name: str, width: int, looks: str
):
    page = opened(width, page_files[name], color_scheme=looks)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_charts(page, width)
    for tab in page.get_by_role("tab").all():
        tab.click()
    check_charts(page, width)


def test_text_and_charts_have_one_width(opened: Any, page_files: dict[str, Path]):
    page = opened(1400, page_files["fits"])
    charts = [c for c in page.evaluate(CHARTS) if "Timeline" in c["name"]]
    text = page.locator(".remarks li").first.bounding_box()
    assert charts[0]["right"] - charts[0]["left"] == pytest.approx(text["width"], abs=2)
    assert charts[0]["left"] == pytest.approx(text["x"], abs=2)


def test_bars_tell_their_values(opened: Any):
    page = opened(1400)
    page.locator("svg.bars .marks rect").first.hover()
    assert re.fullmatch(r"mean GPU: forward [\d.]+%", page.locator("#tip").inner_text())


def test_bars_tell_their_values_without_a_script(opened: Any):
    page = opened(1400, java_script_enabled=False)
    titles = page.locator("svg.bars .marks rect title")
    assert titles.count() > 10
    assert re.fullmatch(r"mean GPU: forward [\d.]+%", titles.first.text_content())


def test_strips_of_the_timeline_tell_their_busy_time(opened: Any):
    page = opened(1400)
    strip = page.locator("svg.timeline path[aria-label]").first
    strip.dispatch_event("pointermove", {"clientX": 300, "clientY": 300, "bubbles": True})
    told = page.locator("#tip").inner_text()
    assert re.fullmatch(r"stage 0: forward [\d.]+ m?s of [\d.]+ m?s", told)


def test_a_link_of_the_front_opens_the_run(opened: Any, page_files: dict[str, Path]):
    page = opened(1400, page_files["search"])
    page.locator("svg a").last.locator("circle").first.click(force=True)
    target = page.evaluate("location.hash.slice(1)")
    assert page.locator(f"#{target}").get_attribute("open") is not None


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
    for only_on_screen in (".hint", ".copy", "nav"):
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
    assert page.locator("[role=tabpanel]").count() == 4
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
