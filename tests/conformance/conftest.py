"""`compare`, beside the tests; scripts that record what torch does need torch, and are no tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = ["record*.py"]
