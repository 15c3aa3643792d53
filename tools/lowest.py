"""Print the lowest version of each run-time dependency that pyproject.toml allows, for pip.

python tools/lowest.py > lowest.txt && pip install -r lowest.txt pytest hypothesis
PYTHONPATH=src python -m pytest -q
"""

import re
import tomllib
from pathlib import Path


def lowest(dependencies: list[str]) -> list[str]:
    """`name==version` for every `name>=version` with whatever follows."""
    found = [re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)", each) for each in dependencies]
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))
    print("\n".join(lowest(project["project"]["dependencies"])))
