"""How MLflow's table of runs is to look: a view it stores with the experiment.

MLflow's UI (3.x) shows no metric and no param at first, and orders columns by name. It can share
what a user has chosen there as a tag of the experiment, by a key in the address; ours is written
the same way, so that all runs lie open, the best first, with the columns that matter.
"""

import json
from collections.abc import Sequence

KEY = "dpsweep"
"""Names the view in an address: .../#/experiments/ID/runs?viewStateShareKey=dpsweep"""

TAG = f"mlflow.sharedViewState.{KEY}"
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tells the UI that these are training runs, and not a chat application's."""


def best_first(metric: str, params: Sequence[str], *, maximise: bool) -> str:
    """The view, as the UI reads it.

    Args:
        metric: What runs are ordered by; its column is the first.
        params: Params that have a column.
        maximise: True if the largest is the best.
    """
    columns = [f"metrics.`{metric}`", *(f"params.`{name}`" for name in params)]
    return json.dumps(
        {
            "selectedColumns": ["attributes.`Duration`", *columns, "tags.`dpsweep.state`"],
            "orderByKey": f"metrics.`{metric}`",
            "orderByAsc": not maximise,
        }
    )
