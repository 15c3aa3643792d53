"""`compare`, beside the tests; `tools/pytorch` records what torch does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
