"""InferenceX' servers of DeepSeek-R1 that draft with its layer for multi-token prediction.

`benchmarks/predictions.py` writes their figures beside the measured ones. Closed loops of users,
ten requests each, lengths uniform between 80% and 100% (as `evidence.servers`). Servers are set up
as SemiAnalysisAI/InferenceX `benchmarks/single_node/` says (`fixed_seq_len/dsr1_fp4_b200_mtp.sh`,
`dsr1_fp8_b200_mtp.sh`, `dsr1_fp8_h200_trt_mtp.sh`, `fixed_seq_len/dsr1_fp8_h200_mtp.sh` and their
like): two drafts with SGLang, three with TensorRT-LLM without attention data parallelism. The
acceptance length is that of the server: tokens come to the client after every `stream` steps, so
that the time between two arrivals over the time per token is so many steps' tokens. (TensorRT-LLM
counts steps. SGLang sends when the number of tokens is a multiple of `stream`, which a step reaches
once in as many times as it gives tokens.) Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from stagewright.evidence.rows import Prediction
from stagewright.evidence.servers import model_of_row
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import Instance, make_instance
from stagewright.serving.metrics import ServingSummary, Slo
from stagewright.serving.schedulers.named import ENGINES
from stagewright.serving.speculative import drafter_of
from stagewright.serving.workloads.synthetic import Lengths, closed_loop
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine


class Measured(NamedTuple):
    """A row of InferenceX; means in milliseconds, output tokens per second and GPU."""

    date: str
    hardware: str
    engine: Literal["sglang", "trtllm"]
    precision: str
    tp: int
    ep: int
    isl: int
    osl: int
    users: int
    tpot: float
    itl: float
    """Between two arrivals at the client, of several tokens each."""
    ttft: float
    tokens: float
    run: int
    """github.com/SemiAnalysisAI/InferenceX/actions/runs/<run>."""

    @property
    def drafts(self) -> int:
        """Of a request in a step."""
        return 2 if self.engine == "sglang" else 3

    @property
    def acceptance(self) -> float:
        """Tokens of a step, by the client's own times."""
        stream = 30 if (self.hardware, self.engine) == ("b200", "sglang") else 10
        return self.itl / self.tpot / stream


ROWS = """
2026-05-20 b200 sglang fp4 8 1 1024 1024 16 9.138 470.30 378.9 201.98 26135021096
2026-05-20 b200 sglang fp4 8 1 8192 1024 4 4.592 306.14 306.4 97.06 26135021096
2026-03-25 b200 sglang fp8 8 1 8192 1024 16 14.758 902.11 1092.3 122.33 23552373331
2026-02-06 b200 trtllm fp4 4 4 1024 8192 8 6.452 177.62 225.9 298.76 21759505598
2026-02-06 b200 trtllm fp4 4 4 8192 1024 32 17.184 434.22 587.4 437.95 21759505598
2026-05-19 b200 trtllm fp4 4 4 8192 1024 32 17.864 457.18 654.9 420.88 26016880548
2026-05-20 h200 sglang fp8 8 1 8192 1024 16 18.051 401.95 766.7 103.36 26135241056
2026-05-20 h200 sglang fp8 8 1 8192 1024 32 26.808 602.02 1076.1 138.41 26135241056
2026-05-20 h200 sglang fp8 8 1 8192 1024 64 41.739 930.71 1843.3 179.96 26135241056
2026-01-14 h200 trtllm fp8 8 8 1024 1024 16 14.195 337.63 918.4 128.28 21012094241
2026-01-14 h200 trtllm fp8 8 8 8192 1024 16 17.639 448.68 793.9 105.37 21012094241
2026-05-18 h200 trtllm fp8 8 8 1024 1024 16 13.690 322.45 365.3 138.09 26016868638
2026-05-18 h200 trtllm fp8 8 8 8192 1024 16 16.547 406.49 742.5 112.23 26016868638
"""


def rows() -> list[Measured]:
    """The rows above."""
    found: list[Measured] = []
    for line in ROWS.strip().splitlines():
        words = line.split()
        engine: Literal["sglang", "trtllm"] = "sglang" if words[2] == "sglang" else "trtllm"
        tp, ep, isl, osl, users = map(int, words[4:9])
        tpot, itl, ttft, tokens = map(float, words[9:13])
        found.append(
            Measured(
                words[0], words[1], engine, words[3], tp, ep, isl, osl, users, tpot, itl, ttft,
                tokens, int(words[13]),
            )
        )  # fmt: skip
    return found


@cache
def server(
    hardware: str,
    engine: Literal["sglang", "trtllm"],
    precision: str,
    tp: int,
    ep: int,
    drafts: int,
) -> Instance:
    """The server, with the time of its drafts."""
    settings: dict[str, Any] = {"model": "deepseek-r1", "tp": tp, "num_speculative_tokens": drafts}
    if ep > 1:
        settings |= {"ep": ep, "etp": 1}
    if (hardware, engine) != ("h200", "sglang"):
        settings["kv_cache_dtype"] = "fp8"
    if precision == "fp8":
        settings["weight_precision"] = "fp8"
    run, model = model_of_row(settings, "deepseek-r1-nvfp4-v2" if precision == "fp4" else "")
    run, how = run.model_copy(update={"mode": "decode"}), Execution(serving_engine=engine)
    machine = Machine.of(resolve(hardware), gpus=run.world_size)
    drafter = drafter_of(EngineSection(speculative_method="mtp"), run, model)
    return make_instance(
        run, model, machine, how, max_tokens=16384, max_requests=256, drafter=drafter
    )


def served(row: Measured) -> ServingSummary:
    """Latencies and rates of the users of a row."""
    made = server(row.hardware, row.engine, row.precision, row.tp, row.ep, row.drafts)
    options: dict[str, Any] = {
        "scheduler": ENGINES[row.engine], "ignore_eos": True, "enable_prefix_caching": False,
        "acceptance_length": row.acceptance,
    }  # fmt: skip
    if row.engine == "trtllm":
        tokens = ((row.drafts + 1) * row.users + row.isl + 64 + 63) // 64 * 64
        options |= {"max_num_batched_tokens": tokens, "max_num_seqs": row.users}
    elif row.hardware == "b200":
        options |= {
            "chunked_prefill_size": 16384,
            "scheduler_recv_interval": 30 if row.users >= 16 else 10,
            "async_scheduling": row.precision == "fp4",  # SGLANG_ENABLE_SPEC_V2 is exported there
        }
    else:
        options |= {"chunked_prefill_size": 32768, "max_prefill_tokens": 32768}
    engines = EngineSection(**options)
    work = closed_loop(
        10 * row.users, row.users, Lengths(isl=row.isl, osl=row.osl, range_ratio=0.8)
    )
    group = InstanceGroup(made, engines)
    return group.serve(work, Slo(), whole_run=True).summary


def predictions() -> Iterator[Prediction]:
    """The figures of all rows."""
    for row in rows():
        name = f"{row.hardware} {row.precision} tp={row.tp} ep={row.ep} {row.isl}/{row.osl}"
        summary = served(row)
        figures = {
            "tpot_ms": (row.tpot, summary.tpot.mean * 1e3),
            "ttft_ms": (row.ttft, summary.ttft.mean * 1e3),
            "output_tokens_s_gpu": (row.tokens, summary.output_rate / summary.gpus),
        }
        for quantity, (measured, predicted) in figures.items():
            yield Prediction(
                f"InferenceX, multi-token prediction, {ENGINES[row.engine]}",
                f"{name} x{row.users} {row.date}", quantity, measured, predicted,
            )  # fmt: skip
