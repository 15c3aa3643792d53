"""The cache of a request between two instances beside closed forms."""

import pytest

from stagewright.errors import UserError
from stagewright.model.catalog import resolve as model_of
from stagewright.run.settings import Run
from stagewright.serving.kv_transfer import KvTransferCost
from stagewright.time.hardware import resolve


def transfer(model, prefill, decode, hardware=("h100-sxm", "h100-sxm")):
    runs = (Run(model=model, mode="decode", **settings) for settings in (prefill, decode))
    return KvTransferCost.between(*runs, model_of(model), tuple(map(resolve, hardware)))


def test_a_rank_sends_its_heads_over_its_own_adapter():
    found = transfer("llama3.1-70b", {"tp": 4}, {"tp": 4})
    assert found.per_token == 2 * 80 * 8 * 128 * 2
    assert found.fixed == pytest.approx(0, abs=1)
    bandwidth = resolve("h100-sxm").scale_out.bandwidth_gb_s * 1e9
    least = 16384 * found.per_token / 4 / bandwidth
    assert least < found.seconds(16384) < 1.1 * least


def test_the_side_with_fewer_ranks_is_the_narrow_one():
    one, four = (transfer("llama3.1-8b", {"tp": tp}, {"tp": 4}) for tp in (1, 4))
    assert one.bytes(5000) == four.bytes(5000)
    assert one.seconds(100_000) == pytest.approx(4 * four.seconds(100_000), rel=0.01)


def test_windows_are_sent_whatever_the_length():
    found = transfer("gpt-oss-120b", {"tp": 1}, {"tp": 2})
    assert found.per_token == 2 * 18 * 8 * 64 * 2
    assert 0 < found.fixed <= 2 * 18 * 8 * 64 * 2 * 144
    parts = found.bytes(1024, last=False) + found.bytes(976, last=True)
    assert parts == pytest.approx(found.bytes(2000), abs=2)
    assert found.seconds(1024, last=False) < found.seconds(1024)


@pytest.mark.parametrize("model", ["mamba2-2.7b", "nemotron-h-8b"])
def test_states_are_not_sent(model):
    with pytest.raises(UserError, match=f"layers of {model} keep states"):
        transfer(model, {"tp": 1}, {"tp": 1})
