"""The examples of modules that are no language models: imported, simulated, and traced."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import ROOT
from stagewright.cli.main import main
from stagewright.imports.sources import model_of, recorded
from stagewright.imports.translate import translate
from stagewright.lower.parameters import parameters
from stagewright.program.columns import PHASES

torch: Any = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
pytestmark = [pytest.mark.slow, pytest.mark.extra]

MLPS = [(13, 512), (512, 256), (256, 128)]
MLPS += [(128 + 27 * 26 // 2, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
PARAMETERS = {
    # facebookresearch/DiT, with its 256 x 1152 positions, which are not trained
    "dit": 675_129_632,
    # github.com/facebookresearch/dlrm/issues/369: 187,767,399 rows of 128, and two MLPs
    "dlrm": 187_767_399 * 128 + sum(i * o + o for i, o in MLPS),
}
CHAINS = {"dit": ("embed", "28 layer", "head"), "dlrm": ("whole",)}
RUNS: dict[str, tuple[str, ...]] = {
    "dit": ("--dp", "2", "--tp", "2", "--zero", "1", "--micro-batch-size", "4",
            "--global-batch-size", "16", "--seq-length", "256"),
    "dlrm": ("--tp", "8", "--dp", "2", "--optimizer", "sgd", "--micro-batch-size", "4096",
             "--global-batch-size", "8192", "--seq-length", "1"),
}  # fmt: skip


def factory(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.factory


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(str(stop.value.code))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("imported")
    files = {name: folder / f"{name}.stg" for name in PARAMETERS}
    for name, file in files.items():
        source = f"{ROOT}/examples/{name}.py:factory"
        assert command("import", source, "--static", "-o", file) == 0
    return files


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name: str):
    translated = translate(recorded(f"{ROOT}/examples/{name}.py:factory", static=True))
    model = model_of(translated, name)
    module, _ = factory(name)()
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
    assert translated.parameters == parameters(model)[0] == PARAMETERS[name]
    assert model.chain == CHAINS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_is_simulated_and_its_traces_are_verified(
    name: str, texts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    run = (texts[name], *RUNS[name])
    assert command("simulate", *run, "--hardware", "h100-sxm", "--json") == 0
    step = json.loads(capsys.readouterr().out)
    assert 0 < step["step_seconds"] < 1
    assert command("generate", *run, "-o", tmp_path / "traces") == 0
    assert command("verify", tmp_path / "traces") == 0


@pytest.mark.parametrize("name", PARAMETERS)
def test_products_do_the_work_that_pytorch_counts(name: str, texts: dict[str, Path]):
    """Matrix products, convolutions and attention of the forward pass.

    The 118.64 GFLOP of DiT-XL/2 in arXiv 2212.09748 count a product and a sum as one.
    """
    counter: Any = pytest.importorskip("torch.utils.flop_counter")
    module, inputs = factory(name)()
    with counter.FlopCounterMode(display=False) as counted:
        module(*inputs)
    settings: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 2, "seq_length": 256}
    (rank,) = sw.compile(sw.Run(model=str(texts[name]), **settings)).program.classes
    t = rank.tasks
    products = [t.ops.index(op) for op in ("einsum", "conv", "attention") if op in t.ops]
    forward = np.isin(t.op, products) & (t.phase == PHASES.index("forward"))
    assert t.flops[forward].sum() == counted.get_total_flops()
    if name == "dit":
        assert counted.get_total_flops() == pytest.approx(2 * 2 * 118.64e9, rel=2e-3)
