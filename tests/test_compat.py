"""What Ray, Optuna and MLflow do not document is as dpsweep/compat.py takes it to be."""

import ast
import http.server
import inspect
import json
import tempfile
import threading
from pathlib import Path

import mlflow
import numpy as np
import optuna
import pytest
import ray
from mlflow import MlflowClient
from optuna.distributions import FloatDistribution, IntDistribution
from ray import tune
from ray.job_submission import JobSubmissionClient
from scipy.stats import qmc

import dpsweep
from dpsweep import compat
from dpsweep.search.study_view import AttributeBuffer

PACKAGE = Path(dpsweep.__file__).parent
LIBRARIES = {"ray", "optuna", "mlflow"}


@pytest.fixture
def study():
    study = optuna.create_study(study_name="s", pruner=optuna.pruners.MedianPruner(0, 0))
    for x in (0.1, 0.2, 0.9):
        trial = study.ask({"x": FloatDistribution(0, 1)})
        trial.report(x, 1)
        study.tell(trial, x)
    return study


def test_storage_and_id_of_a_study_are_those_its_storage_knows(study):
    storage, found = compat.storage_of(study), compat.study_id(study)
    assert storage.get_study_id_from_name("s") == found
    trial_id = storage.get_trial_id_from_study_id_trial_number(found, 2)
    storage.set_trial_user_attr(storage.create_new_trial(found), "row", 1)
    assert storage.get_trial(trial_id).value == study.trials[2].value
    assert study.trials[3].user_attrs == {"row": 1}


def test_a_value_lies_in_a_distribution_or_not():
    assert compat.contains(FloatDistribution(0, 1), 0.5)
    assert not compat.contains(FloatDistribution(0, 1), 1.5)
    assert compat.contains(IntDistribution(1, 9, step=2), 3)
    assert not compat.contains(IntDistribution(1, 9, step=2), 4)


def test_optuna_reads_trials_by_the_method_that_a_restricted_study_replaces():
    of_optuna = inspect.signature(optuna.Study._get_trials)
    ours = inspect.signature(compat._restricted_class()._get_trials)
    assert list(of_optuna.parameters) == list(ours.parameters)


def test_sampler_and_pruner_see_the_trials_of_a_restricted_study_alone(study):
    seen = study.trials[:2]
    restricted = compat.restrict_study(study, seen)
    assert restricted.get_trials() == seen
    assert restricted.direction == study.direction
    nothing = compat.restrict_study(study, [])
    for some, keys in ((restricted, {"x"}), (nothing, set())):  # a sampler remembers what it saw
        found = optuna.samplers.TPESampler().infer_relative_search_space(some, study.trials[0])
        assert found.keys() == keys
    last = study.trials[2]  # is worse than the median of the two others
    assert study.pruner.prune(restricted, last)
    assert not study.pruner.prune(nothing, last)


def test_sobol_points_are_those_of_the_sequence_whatever_was_drawn(study):
    space = {"x": FloatDistribution(0, 1), "y": FloatDistribution(0, 1)}
    trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
    points = []
    for index in (1, 0, 1, 2, 3):
        sampler = compat.sobol_point(space, 7, index)
        assert sampler.infer_relative_search_space(study, trial) == space
        points.append(sampler.sample_relative(study, trial, space))
    assert points[0] == points[2]
    assert {(p["x"] >= 0.5) for p in points[1:]} == {True, False}
    sequence = qmc.Sobol(2, scramble=True, seed=7).random(4)
    drawn = [[p["x"], p["y"]] for p in (points[1], points[0], points[3], points[4])]
    np.testing.assert_allclose(drawn, sequence)


def test_a_sampler_writes_to_the_storage_that_it_is_given(study):
    notes = AttributeBuffer()
    restricted = compat.restrict_study(study, study.trials, notes)
    sampler = optuna.samplers.CmaEsSampler(n_startup_trials=0)
    trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
    ways = {"x": FloatDistribution(0, 1), "y": FloatDistribution(0, 1)}
    sampler.sample_relative(restricted, trial, ways)
    assert any("cma" in key for key in notes.attrs)
    assert not any(t.system_attrs for t in study.trials)


def test_the_named_cluster_is_the_one_of_auto(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:1234")
    assert compat.running_here() == "10.1.2.3:1234"


@pytest.mark.ray
def test_a_cluster_without_tokens_takes_anybody_and_an_empty_port_is_away(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # tmp_path is too long for a socket
        ray.init("local", num_cpus=1, include_dashboard=False, _temp_dir=folder)
        try:
            address = ray.get_runtime_context().gcs_address
            assert compat.answer_without_token(address) == compat.TAKEN
            assert compat.find_dashboard() is None
            monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", "https://proxy/ray")
            assert compat.find_dashboard() == "https://proxy/ray"
        finally:
            ray.shutdown()
    monkeypatch.setattr(compat, "_PROBE_SECONDS", 3)  # Ray's client would try for 30
    assert compat.answer_without_token("127.0.0.1:1") == compat.AWAY


def test_the_upload_logs_under_the_name_that_is_silenced():
    from ray._private.runtime_env import packaging

    assert packaging.__name__ == compat.PACKAGING_LOGGER
    assert packaging.default_logger.name == compat.PACKAGING_LOGGER


def test_the_heads_resource_is_rays_own_name_of_it():
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    assert compat.HEAD_RESOURCE == HEAD_NODE_RESOURCE_NAME


def test_a_client_of_jobs_knows_rays_version_on_the_cluster():
    class Dashboard(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"version": "4", "ray_version": "2.61.7", "ray_commit": "x"})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = JobSubmissionClient(f"http://127.0.0.1:{server.server_port}")
        assert compat.server_ray_version(client) == "2.61.7"
        server.shutdown()


@pytest.mark.filterwarnings("ignore")  # MLflow's own, on its first import
def test_a_client_of_a_database_has_its_engine(tmp_path):
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert compat.database_engine(client).url.database == f"{tmp_path}/mlflow.db"


def test_mlflows_pages_read_the_tag_and_the_key_of_a_shared_view():
    pages = Path(mlflow.__file__).parent / "server/js/build/static/js"
    text = "".join(place.read_text(errors="ignore") for place in pages.rglob("*.js"))
    words = ["mlflow.sharedViewState", "viewStateShareKey", "selectedColumns", "orderByKey"]
    words += ["compareRunCharts", "compareRunSections", "compareRunsMode", "isAccordionReordered"]
    words += [
        "showAllRuns",
        "selectedParams",
        "orderByAsc",
        "mlflow.experimentKind",
        *compat.EXPERIMENT_KIND.values(),
    ]
    assert [word for word in words if word not in text] == []


def test_nobody_else_uses_what_the_libraries_do_not_document():
    """In files that import Ray, Optuna or MLflow: no private module, and none's private name."""
    found = []
    for place in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(place.read_text())))
        modules = {module for node in nodes for module in _modules(node)}
        if place.name == "compat.py" or not LIBRARIES & {m.split(".")[0] for m in modules}:
            continue
        private = [m for m in modules if any(part.startswith("_") for part in m.split("."))]
        names = [
            ast.unparse(node)
            for node in nodes
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
            and ast.unparse(node.value) not in ("self", "cls", "os")
        ]
        texts = [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and any(f"{library}._" in node.value for library in LIBRARIES)
        ]
        found += [f"{place.name}: overrides {name}" for name in _overrides(nodes)]
        found += [f"{place}: {what}" for what in [*private, *names, *texts]]
    assert found == []


def _modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def _overrides(nodes):
    """Private methods of classes whose base is a library's, by a name that base has too."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = ast.unparse(base).split(".")[-1]
                known = [vars(optuna), vars(optuna.samplers), vars(optuna.pruners), vars(tune)]
                owner = next((names[name] for names in known if name in names), object)
                yield from (
                    f"{node.name}.{method.name}"
                    for method in node.body
                    if isinstance(method, ast.FunctionDef)
                    and method.name.startswith("_")
                    and not method.name.endswith("__")
                    and hasattr(owner, method.name)
                )
