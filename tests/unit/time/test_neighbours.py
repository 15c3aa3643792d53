"""Messages between neighbouring ranks of pipelines: configurations that take equally long."""

import numpy as np

from stagewright.time.columns.neighbours import NeighbourMessages
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine


def test_classes_are_equal_where_messages_on_all_ways_take_as_long():
    random = np.random.default_rng(0)
    size, stride = random.choice([1e6, 4e6], 60), random.choice([1, 2, 3, 8], 60)
    beyond = random.choice([1, 4], 60)
    messages = NeighbourMessages(size, stride, beyond, 4, Machine.of(resolve("h100-sxm"), gpus=96))
    ways = (0, 1), (1, 2), (3, 0)
    seconds = np.stack([messages.seconds(*way) for way in ways])
    same = (seconds[:, :, None] == seconds[:, None]).all(axis=0)
    found = messages.classes(ways)
    assert (np.equal.outer(found, found) == same).all()
    assert 1 < len(np.unique(found)) < len(np.unique(np.stack([size, stride, beyond]), axis=1).T)
    assert not messages.classes(()).any()
    some = np.array([7, 3])
    assert messages.take(some).seconds(1, 2).tolist() == messages.seconds(1, 2)[some].tolist()
