"""Public functions refuse arguments of other types in one line."""

from collections.abc import Callable

import pytest

import stagewright as sw


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sw.resolve(None), "got None, wanted the name of a model"),
        (lambda: sw.load_run("run.yaml", {1: 2}), "got {1: 2}, wanted overrides"),
        (lambda: sw.search("gpt2", "h100-sxm", vary={1: [2]}), "got {1: [2]}, wanted vary"),
        (lambda: sw.search("gpt2", "h100-sxm", objective=[1]), "got 1, wanted the name"),
        (lambda: sw.report("gpt2", 1), "got 1, wanted a path"),
        (lambda: sw.compile("gpt2", table={1: 2}), "got {1: 2}, wanted table"),
        (lambda: sw.generate(sw.compile("gpt2", layers=1, seq_length=8), 1), "got 1, wanted"),
    ],
)
def test_arguments_of_other_types_are_one_line(call: Callable[[], object], says: str):
    with pytest.raises(sw.UserError) as error:
        call()
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)
