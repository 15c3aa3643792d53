"""Fit how unevenly tokens choose experts in inference; print the errors of held-out rows.

    python benchmarks/fit_routing.py [EXPONENT ...]

Rows are the times per token of `data/measured/serving.csv` whose model is a mixture of experts.
Of the servers, 70% fit and 30% are held out, by a hash of the row. Errors: mean of
|log(predicted / measured)|, for each exponent (`lower.routing.POPULARITY_EXPONENT`); 0: all experts
get equally many tokens. Rows of TensorRT-LLM that stream 20 tokens at a time are left out: its host
then takes less than `serving.host` says.
"""

from __future__ import annotations

import sys
import zlib

import numpy as np

from stagewright.evidence import servers
from stagewright.evidence.servers import ClosedLoopRow, model_of_row
from stagewright.lower import routing

EXPONENTS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
STREAMED = "gpt-oss-120b"
"""Of InferenceX with TensorRT-LLM (gptoss_fp4_b200_trt.sh: stream_interval 20)."""


def mixtures() -> list[ClosedLoopRow]:
    """Rows of times per token of mixtures of experts."""
    return [
        row
        for row in servers.closed_loops()
        if row.quantity == "tpot_ms"
        and model_of_row({**row.settings, "mode": "decode"}, row.checkpoint)[1].num_experts
        and not (row.engine == "trtllm" and row.settings["model"] == STREAMED)
    ]


def main(exponents: list[float]) -> None:
    """Print the errors for each exponent."""
    rows = mixtures()
    held = np.array([zlib.crc32(row.row.encode()) % 10 < 3 for row in rows])
    for exponent in exponents:
        routing.POPULARITY_EXPONENT = exponent
        servers._instance.cache_clear()  # pyright: ignore[reportPrivateUsage]
        errors = np.log([row.predict(row.simulate()) / row.measured for row in rows])
        size = np.abs(errors)
        print(
            f"{exponent:g}: fitted {size[~held].mean():.3f}, held out {size[held].mean():.3f}, "
            f"bias {errors.mean():+.3f}, {len(rows)} rows",
            flush=True,
        )


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]] or list(EXPONENTS))
