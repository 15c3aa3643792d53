"""Types of the numpy arrays that programs, timings and traces are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
"""Rows, ranks, sizes in bytes."""
Bool = NDArray[np.bool_]
"""Which rows or ranks are meant."""
Float = NDArray[np.float64]
"""Seconds, shares."""
