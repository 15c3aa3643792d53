"""Reads a page as a browser would, as far as a test needs it: tags, ids, what refers to what."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements and their attributes; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.open, self.getpos())

    def values(self, name: str) -> list[str]:
        return [attrs[name] for _, attrs in self.elements if name in attrs]


def check(text: str) -> Page:
    """A page that stands alone, with ids once each and all that refers to them right."""
    page = Page(text)
    ids = page.values("id")
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})
    for name in ("aria-controls", "aria-labelledby"):
        assert set(page.values(name)) <= set(ids)
    for link in page.values("href"):
        assert link == "data:," or link.removeprefix("#") in ids, link
    for fill in page.values("fill"):
        if fill.startswith("url("):
            assert fill[5:-1] in ids, fill
    assert not page.values("src")
    for loads in ("@import", "url(h", "url('", 'url("', "fetch(", "XMLHttpRequest", "import("):
        assert loads not in text
    for tag, attrs in page.elements:
        if tag == "svg":
            assert attrs["role"] == "img"
            assert attrs["aria-label"]
    return page
