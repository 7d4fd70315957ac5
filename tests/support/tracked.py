"""What a tracking server holds of a sweep."""

import warnings
from typing import Any


def run_name(run: Any) -> str:
    """A run's name without what is told of its config: trial-0007, or the sweep's name."""
    tag = run.data.tags.get("dpsweep.trial")
    return f"trial-{int(tag.rpartition('/')[2]):04d}" if tag else run.info.run_name


def tracked_runs(uri: str, sweep: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Every MLflow run of a sweep by its name, and the optimizer steps of its accuracies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(sweep).experiment_id
        runs = client.search_runs([experiment], max_results=500)
        names = [run_name(run) for run in runs]
        assert len(names) == len(set(names)), "a trial has two runs"
        histories = {
            run_name(run): client.get_metric_history(run.info.run_id, "valid/accuracy")
            for run in runs
        }
    steps = {name: [m.step for m in history] for name, history in histories.items()}
    return dict(zip(names, runs, strict=True)), steps
