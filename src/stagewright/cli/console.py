"""Where tables are printed: a console that hands no control characters of others to a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from stagewright.printable import printable_lines


class PlainTextConsole(Console):
    """A console of rich's, on which text is text: a name is no markup, and moves no cursor."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As a console renders, with what is not printable escaped."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
