"""What steps cost the owner of the machine: a file of costs gives the price of a GPU-hour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stagewright.searching.candidates import Candidates
from stagewright.searching.enumeration import prefill_gpus
from stagewright.searching.figures import Figures
from stagewright.time.expense.ownership import costs_of


def with_costs(rows: Candidates, figures: Figures) -> Figures:
    """Figures of candidates whose USD are those of the file of costs, where there is one.

    Power, which a part of the costs is for, is the energy of a step divided by its time.
    """
    cluster = rows.base.cluster
    costs = costs_of(cluster.price, cluster.costs)
    if costs is None:
        return figures
    gpus = rows.world_size + prefill_gpus(rows.base.run)
    hourly = costs.usd_per_gpu_hour(figures.joules / (figures.seconds * gpus))
    return replace(figures, usd=np.asarray(hourly * gpus * figures.seconds / 3600))
