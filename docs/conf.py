"""How Sphinx builds these pages: `python -m sphinx -W --keep-going docs dist/docs`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import reference  # noqa: E402  (beside this file)

from stagewright import __version__  # noqa: E402

reference.write()

project = "Stagewright"
author = copyright = "The Stagewright authors"
version = release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
exclude_patterns = ["release.md"]
html_theme = "furo"
html_title = f"Stagewright {__version__}"
html_static_path: list[str] = []
html_extra_path = ["reference/run.schema.json"]
pygments_style = "friendly"
