"""A sweep over people's rows of a table, from launch to a registered model, in words that fit."""

import random
import re
import warnings

import pytest
from tracked import tracked_runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SWEEP = """\
name: costs
base:
  data:
    name: table
    file: people.csv
    target: cost
    columns: {age: {range: [0, 120]}, sex: {categories: [f, m]}}
    task: {name: regression, range: [-1000, 3000]}
    num_train: 600
    unit: {column: person, examples_per_unit: 3, num_units: 200}
    validation: holdout
  model: {name: linear}
  privacy: {epsilon: 4, scope: sweep, clip_norm: 0.3}
  train: {batch_size: 60, epochs: 4, evaluate_every: 2}
  method: {name: dp_sgd}
search:
  optimizer.total_step: {log_uniform: [1, 10]}
objective: {metric: valid/r2}
budget: {explore: {trials: 2, share: 0.2}}
"""
WRONG = ("ccurac", "image", "pixel", "picture", "held-out examples")


def test_every_word_of_a_sweep_over_units_of_a_table_fits_it(tmp_path, dpsweep, verb):
    rng = random.Random(0)
    rows = []
    for number in range(600):
        age, sex = rng.randint(18, 90), rng.choice("fm")
        rows.append(f"p{number // 3},{age},{sex},{20 * age + 300 * (sex == 'f'):.2f}")
    (tmp_path / "people.csv").write_text("\n".join(["person,age,sex,cost", *rows]))
    (tmp_path / "costs.yaml").write_text(SWEEP)
    told = dpsweep("launch", "costs.yaml")
    told += verb("best", "costs") + verb("compare", "costs") + verb("status", "costs")
    assert "180 units (all training rows with one value of 'person')" in " ".join(told.split())
    assert re.search(r"trial +mae +r2 +loss", told), told
    verb("report", "costs", "-o", "costs.html")
    verb("export", "costs", "-o", "best")
    page = (tmp_path / "costs.html").read_text()
    told += re.sub(r"<script>.*?</script>", "", page, flags=re.S)  # plotly; figures have a type
    assert "20 held-out units without noise" in " ".join(told.split())
    told += next((tmp_path / "best").iterdir()).read_text()
    told += verb("export", "costs", "--register", "costs")
    refused = verb("export", "costs", "--format", "opacus", "-o", "opacus", code=2)
    assert "data.name: scripts are written for images, and table has none" in refused
    assert [word for word in WRONG if word in told] == []
    verb("train", next((tmp_path / "best").iterdir()), "-o", "again")

    uri = f"sqlite:///{tmp_path}/.dpsweep/mlflow.db"
    runs, _ = tracked_runs(uri, "costs")
    assert {"valid/mae", "valid/r2", "valid/loss"} <= runs["trial-0002"].data.metrics.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        version = MlflowClient(uri).get_model_version_by_alias("costs", "champion")
    assert "rows of a table as data.columns encodes them, each 3, and gives (y - 1000) / 2000" in (
        version.description
    )
    noted = runs["costs"].data.tags["mlflow.note.content"] + version.description
    assert [word for word in WRONG if word in noted] == []
