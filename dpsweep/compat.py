"""Every use of what Ray, Optuna and MLflow do not document, each with its reason.

An upgrade may break what stands here, and nothing else: tests/test_compat.py fails then. The
libraries are imported inside the functions, as most who import this module need one of them.
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Container, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna
    from mlflow import MlflowClient
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, TrialState
    from ray.job_submission import JobSubmissionClient
    from sqlalchemy.engine import Engine

# Optuna


def storage_of(study: "optuna.Study") -> "BaseStorage":
    """Return a study's storage.

    Optuna's public methods read all trials to find one, and write an attribute of a trial only
    while `optimize` holds it; the storage reads and writes one trial by its id.
    """
    return study._storage


def study_id(study: "optuna.Study") -> int:
    """Return a study's id in its storage: what the storage's methods take, without a query."""
    return study._study_id


def contains(distribution: "BaseDistribution", value: Any) -> bool:
    """True if a sampler's value lies in a distribution.

    Samplers propose values for parameters that a condition excludes or narrows. Optuna makes the
    same check in `Trial.suggest_*`, which we do not use, as a proposal is stored whole or not.
    """
    return distribution._contains(distribution.to_internal_repr(value))


def restrict_study(
    study: "optuna.Study", trials: Sequence["FrozenTrial"], storage: object = None
) -> "optuna.Study":
    """A study of which samplers and pruners see some trials only.

    Optuna has no public way to show a sampler a part of a study: samplers and pruners ask
    `study._get_trials`, and write to `study._storage`.

    Args:
        trials: What is seen of it.
        storage: Takes what a sampler writes; the study's own if None.
    """
    made = _restricted_class()()  # type: ignore[call-arg]  # ours takes none
    made.study_name, made._study_id = study.study_name, study._study_id
    made._directions = study._directions
    made._storage = study._storage if storage is None else storage  # type: ignore[assignment]
    made._trials = trials  # type: ignore[attr-defined]
    return made


@cache
def _restricted_class() -> type["optuna.Study"]:
    import optuna

    class Restricted(optuna.Study):
        """A study without a connection of its own."""

        _trials: Sequence["FrozenTrial"]

        def __init__(self) -> None:  # Optuna's looks the study up in the storage
            pass

        def _get_trials(
            self,
            deepcopy: bool = True,
            states: "Container[TrialState] | None" = None,
            use_cache: bool = False,
        ) -> "list[FrozenTrial]":
            seen = [t for t in self._trials if states is None or t.state in states]
            return copy.deepcopy(seen) if deepcopy else seen

    return Restricted


def sobol_point(
    space: "dict[str, BaseDistribution]", seed: int, index: int
) -> "optuna.samplers.BaseSampler":
    """A sampler of one point of a scrambled Sobol sequence, by its index.

    Optuna's own counts in the storage which points were drawn; a driver that dies after drawing
    one would skip it. There is no public way to name the index.
    """
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        made = _sobol_class()(scramble=True, seed=seed)
    made.point = (space, index)  # type: ignore[attr-defined]
    return made


@cache
def _sobol_class() -> "type[optuna.samplers.QMCSampler]":
    import optuna

    class Sobol(optuna.samplers.QMCSampler):
        point: "tuple[dict[str, BaseDistribution], int]"

        def infer_relative_search_space(
            self, study: optuna.Study, trial: "FrozenTrial"
        ) -> "dict[str, BaseDistribution]":
            return self.point[0]

        def _find_sample_id(
            self, study: optuna.Study, search_space: "dict[str, BaseDistribution]"
        ) -> int:
            return self.point[1]

    return Sobol


# Ray

PACKAGING_LOGGER = "ray._private.runtime_env.packaging"
"""Logs each file of an upload at INFO, and Ray has no option against it."""

HEAD_RESOURCE = "node:__internal_head__"
"""A resource of a cluster's head alone, by which a job is placed there. The public way, the head's
node id, needs a connection before the job is submitted."""

ACCELERATOR_PREFIX, ACCELERATOR_GRAIN = "accelerator_type:", 0.001
"""Custom resource of nodes with a type of GPU, and how little of it Ray itself asks for a task with
`accelerator_type=H100`. Placement groups have no such option, and take the resource."""

REFUSED, TAKEN, AWAY = "refused", "taken", "away"
"""Answers of a cluster to a client without a token; away: none."""

_PROBE_SECONDS = 30
_PROBE = f"""
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
    print("{TAKEN}")
except Exception as e:
    print("{REFUSED}" if "auth" in type(e).__name__.lower() else "{AWAY}")
"""
"""Asks a cluster for its nodes, in a process without a token: Ray reads its own only once. By the
private client, as `ray.init` would start a driver on the cluster."""


def running_here() -> str | None:
    """Address of the cluster that `--address auto` leads to; None if there is none.

    `ray.init` tells it only once it has connected.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found: str | None = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        return None
    return found


def answer_without_token(address: str) -> str:
    """REFUSED, TAKEN or AWAY: what the cluster at HOST:PORT says to somebody without a token."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    env["RAY_AUTH_MODE"] = "disabled"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env=env,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return AWAY
    return asked.stdout.strip().splitlines()[-1] if asked.stdout.strip() else AWAY


def has_autoscaler() -> bool:
    """True if the connected cluster adds nodes when they are wanted.

    Ray has no public way to know. The head tells whether its second autoscaler runs, and the first
    one notes the type of each node: on a cluster that never grows, each is a type of its own.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get("__autoscaler_v2_enabled", namespace="__autoscaler") == b"1":
        return True
    status = _internal_kv_get("__autoscaling_status")
    report = (json.loads(status) if status else {}).get("autoscaler_report") or {}
    types = (report.get("node_type_mapping") or {}).values()
    return any(not name.startswith("node_") for name in types)


def find_dashboard() -> str | None:
    """Address of the connected cluster's dashboard; None if it has none.

    `ray.init` returns it to whoever connects, which may be the caller of our Python interface.
    RAY_OVERRIDE_DASHBOARD_URL names it as it is seen from outside, behind a proxy.
    """
    from ray._private.worker import _global_node

    found = os.environ.get("RAY_OVERRIDE_DASHBOARD_URL") or getattr(_global_node, "webui_url", None)
    return (found if "://" in found else f"http://{found}") if found else None


def draining_nodes() -> list[str]:
    """List the ids of the connected cluster's draining nodes: spot nodes before their end."""
    from ray._private.state import state

    return list(state.get_draining_nodes())


def server_ray_version(client: "JobSubmissionClient") -> str:
    """Ray's version on the cluster; the public `get_version` is that of the jobs' interface."""
    return str(client._server_ray_version)


# MLflow

VIEW_KEY = "dpsweep"
"""Names the view in an address: see `view_path`."""

VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tells the UI that these are training runs, and not a chat application's."""


def format_view(metric: str, params: Sequence[str], axes: Sequence[str], *, maximise: bool) -> str:
    """A view of runs, as MLflow's UI reads it: the table, the best first, and two charts.

    The UI (3.x) shows no metric and no param at first, and orders columns by name. It shares what
    a user has chosen there as a tag of the experiment, by a key in the address. Ours is written
    the same way; there is no public way to write one. The UI adds a chart for each other metric. It
    draws curves of the first ten runs, and parallel coordinates of all.

    Args:
        metric: What runs are ordered by; its column is the first.
        params: Params that have a column.
        axes: Params of parallel coordinates, which leave out a run that lacks one.
        maximise: True if the largest is the best.
    """
    section = "dpsweep-section"
    chart = {"metricSectionId": section, "deleted": False, "isGenerated": False}
    curves = {
        **{"type": "LINE", "uuid": "dpsweep-curves"},
        **{"metricKey": metric, "selectedMetricKeys": [metric], "xAxisKey": "step"},
        **{"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "lineSmoothness": 0},
        **{"scaleType": "linear", "xAxisScaleType": "linear", "range": {}, "yAxisKey": "metric"},
        **{"yAxisExpressions": [], "ignoreOutliers": False, "selectedXAxisMetricKey": ""},
    }
    coordinates = {
        **{"type": "PARALLEL", "uuid": "dpsweep-coordinates", "showAllRuns": True},
        **{"selectedParams": list(axes), "selectedMetrics": [metric]},
    }
    columns = [f"metrics.`{metric}`", *(f"params.`{name}`" for name in params)]
    return json.dumps(
        {
            "selectedColumns": ["attributes.`Duration`", *columns, "tags.`dpsweep.state`"],
            "orderByKey": f"metrics.`{metric}`",
            "orderByAsc": not maximise,
            "compareRunCharts": [{**chart, **coordinates}, {**chart, **curves}],
            "compareRunSections": [
                {"uuid": section, "name": "Sweep", "display": True, "isReordered": True}
            ],
            "isAccordionReordered": True,  # else sections stand in the order of their names
        }
    )


def view_path(experiment: str, *, charts: bool = False) -> str:
    """Path of an experiment's table or charts of runs in MLflow's UI, in our `format_view`.

    Without the workflow the UI (3.x) shows the pages of a chat application's traces first.
    """
    query = f"viewStateShareKey={VIEW_KEY}&workflowType=machine_learning"
    mode = "&compareRunsMode=CHART" if charts else ""
    return f"#/experiments/{experiment}/runs?{query}{mode}"


def database_engine(client: "MlflowClient") -> "Engine":
    """The SQLAlchemy engine of a client whose tracking URI is a database.

    MLflow has no option for a connection's pragmas, and without a write-ahead log readers of its
    SQLite file hold up the writer.
    """
    engine: Engine = client._tracking_client.store.engine
    return engine
