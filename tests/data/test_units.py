"""User-level privacy: all rows of a unit together move a sum by one clip norm."""

import math

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.cli.verbs import audit as audit_verb
from dpsweep.config.plan import plan_privacy, statement_of_trial
from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import TrialConfig, load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.core.inputs import take_rows
from dpsweep.core.seeds import Secret
from dpsweep.data import validate_data
from dpsweep.data.read import load_dataset
from dpsweep.data.units import group_rows, list_units
from dpsweep.privacy import engine as engines
from dpsweep.privacy.audit import bound_epsilon
from dpsweep.privacy.engine.base import MicrobatchEngine
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.audit import sample_scores
from dpsweep.training.check import check_trial
from dpsweep.training.loop import train
from dpsweep.training.release_check import check_releases
from dpsweep.training.trial_dir import TrialDir

ROWS = [("ann", 0, 0), ("bob", 6, 0), ("ann", 12, 1), ("cat", 18, 1), ("ann", 24, 0)]
ROWS += [("bob", 30, 1), ("dan", 36, 0)]
K = 2


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()
    for name in ("_stateless", "_wrong", "_mixing"):
        monkeypatch.setattr(engines, name, type(getattr(engines, name))())


def write(path, rows=ROWS):
    lines = [",".join(map(str, row)) for row in (("who", "age", "sick"), *rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def section(tmp_path, rows=ROWS, k=K, **more):
    path = str(write(tmp_path / "visits.csv", rows))
    test = str(write(tmp_path / "test.csv", [("eve", 1, 0), ("eve", 2, 1)]))
    base = {
        "name": "table",
        "file": path,
        "test_file": test,
        "target": "sick",
        "columns": {"age": {"range": [0, 60]}},
        "task": {"name": "classification"},
        "num_classes": 2,
        "num_train": len(rows),
        "num_test": 2,
        "unit": {
            "column": "who",
            "examples_per_unit": k,
            "num_units": len({row[0] for row in rows}),
        },
    }
    return {x: y for x, y in (base | more).items() if y is not None}


def trial(data, **train):
    return {
        "data": data,
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "clip_norm": 0.05},
        "train": {"batch_size": 2, "epochs": 1, "dtype": "float64", "device": "cpu", **train},
        "method": {"name": "dp_sgd"},
    }


def step_of(tmp_path, **more):
    config = TrialConfig.model_validate(trial(section(tmp_path, **more)))
    return assemble_step(config, Secret.draw(), torch.device("cpu"))


def gradient(step, age, sick):
    params = {k: p.clone().requires_grad_() for k, p in initial_params(step).items()}
    x = torch.tensor([[age / 30 - 1]], dtype=torch.float64)
    logits = x @ params["1.weight"].T + params["1.bias"]
    loss = cross_entropy(logits, torch.tensor([sick]))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*params.values()])])


def flat(tree):
    return torch.cat([x.flatten() for x in tree.values()])


def test_rows_of_a_unit_lie_side_by_side():
    rows = torch.arange(5.0)[:, None], torch.arange(5)
    inputs, targets = group_rows(rows, [[0, 2, 4], [1], [3, 1]], 3)
    assert inputs[..., 0].tolist() == [[0, 2, 4], [1, 1, 1], [3, 1, 3]]
    assert targets["targets"].tolist() == [[0, 2, 4], [1, 1, 1], [3, 1, 3]]
    assert targets["weights"].tolist() == [[1, 1, 1], [3, 0, 0], [1.5, 1.5, 0]]


def test_the_first_rows_of_a_unit_are_used():
    assert list_units(torch.tensor([5, 6, 5, 5]), 2) == [[0, 2], [1]]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus' own
@pytest.mark.parametrize("engine", ["bookkeeping", "vmap", "opacus"])
@pytest.mark.parametrize("clip_norm", [0.05, 1e6], ids=["clipped", "as it is"])
def test_a_units_answer_is_the_mean_over_its_rows_clipped_once(tmp_path, engine, clip_norm):
    tree = trial(section(tmp_path), engine=engine)
    tree["privacy"]["clip_norm"] = clip_norm
    config = TrialConfig.model_validate(tree)
    step = assemble_step(config, Secret.draw(), torch.device("cpu"))
    progress = step.start(initial_params(step))
    units = {"ann": [(0, 0), (12, 1)], "bob": [(6, 0), (30, 1)], "cat": [(18, 1)], "dan": [(36, 0)]}
    total = 0
    for number, rows in enumerate(units.values()):
        mean = torch.stack([gradient(step, *row) for row in rows]).mean(0)
        expected = mean * min(1, clip_norm / float(mean.norm()))
        found = flat(step.sum_clipped(torch.tensor([number]), progress))
        torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-9)
        total = total + expected
    whole = flat(step.sum_clipped(torch.arange(4), progress))
    torch.testing.assert_close(whole, total.double(), rtol=1e-6, atol=1e-9)


def test_sampling_plan_and_statement_count_units(tmp_path):
    config = TrialConfig.model_validate(trial(section(tmp_path)))
    plan = plan_privacy(config)
    assert (plan.num_examples, plan.run.sampling_rate) == (4, 0.5)
    words = statement_of_trial(config, 1.0, 1.0)
    rows = f"Declared public too: the number of all units' rows together, {config.data.num_train}."
    assert rows in words  # a unit that is added or removed changes it
    assert "any one of 4 units (all training rows with one value of 'who')" in words
    step = step_of(tmp_path)
    assert max(max(step.batch(t).tolist(), default=0) for t in range(50)) == 3
    held = TrialConfig.model_validate(trial(held_out(tmp_path)))
    assert held.data.num_examples == 2
    assert "on 2 units held out" in statement_of_trial(held, 1.0, 1.0)


def test_audit_says_that_a_unit_comes_and_goes(tmp_path, monkeypatch):
    """Of the release checks, of many runs and of one run; and an example where there are none."""

    def in_this_process(plan):
        return bound_epsilon("dp_sgd", *sample_scores(plan, plan.runs), plan.epsilon, plan.delta)

    monkeypatch.setattr(audit_verb, "audit_plan", in_this_process)
    rows = [(f"patient {i % 10}", i, i % 2) for i in range(20)]  # an audit has nine units

    def said(*words, **more):
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(trial(section(tmp_path, rows, **more))))
        done = CliRunner().invoke(app, ["audit", str(path), *words])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    unit = "one of the units (all training rows with one value of 'who')"
    assert f"Sensitivity is that to {unit}, added or removed." in said()
    assert f"The canary stands for {unit}." in said("--runs", "20", "--steps", "1")
    assert f"A canary stands for {unit}." in said("--one-run", "40", "--steps", "1")
    assert "Sensitivity is that to one of the training examples, added" in said(unit=None)


def held_out(tmp_path, **more):
    gone = {"test_file": None, "num_test": None, "validation": "holdout", "holdout_fraction": 0.5}
    return section(tmp_path, **gone, **more)


def test_whole_units_are_held_out(tmp_path):
    for seed in range(5):
        data = load_dataset(validate_data(held_out(tmp_path)), seed)
        assert data.inputs.shape == (2, K, 1)
        trained = set((30 * data.inputs.flatten() + 30).round().int().tolist())
        measured = set((30 * data.valid_inputs.flatten() + 30).round().int().tolist())
        own = [{0, 12}, {6, 30}, {18}, {36}]
        assert trained == set().union(*(rows for rows in own if rows & trained))
        assert not trained & measured
        assert len([rows for rows in own if rows <= measured]) == 2


def test_one_row_of_a_unit_needs_no_weights(tmp_path):
    data = load_dataset(validate_data(section(tmp_path, k=1)), 0)
    assert data.inputs.shape == (4, 1)
    assert data.targets.tolist() == [0, 0, 1, 0]


def test_units_that_are_split_over_training_and_test_are_refused(tmp_path):
    tree = section(tmp_path)
    write(tmp_path / "test.csv", [("ann", 1, 0), ("eve", 2, 1)])
    with pytest.raises(ConfigError, match=r"test\.csv: 1 units of column 'who' have rows here and"):
        load_dataset(validate_data(tree), 0)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ({"num_units": 5}, "declares 5, and column 'who' of .* names 4 units"),
        ({"column": "whom"}, "has no column 'whom'. Did you mean 'who'"),
    ],
)
def test_units_that_are_not_as_declared_are_said(tmp_path, unit, message):
    tree = section(tmp_path)
    tree["unit"] |= unit
    with pytest.raises(ConfigError, match=message):
        load_dataset(validate_data(tree), 0)


def test_more_units_than_rows_and_a_row_of_nobody_are_said(tmp_path):
    tree = section(tmp_path)
    tree["unit"]["num_units"] = 100
    with pytest.raises(ValueError, match=r"is 100, and data\.num_train is 7"):
        validate_data(tree)
    with pytest.raises(ConfigError, match=r"line 3: column 'who': is empty, and says of no unit"):
        load_dataset(validate_data(section(tmp_path, [ROWS[0], ("", 1, 1)])), 0)


def test_batch_of_more_than_all_units_is_said(tmp_path):
    source = parse_yaml(yaml.safe_dump(trial(section(tmp_path), batch_size=5)), "x.yaml")
    with pytest.raises(ConfigError, match="batch_size: 5 exceeds the 4 private units of table"):
        load_trial(source)


def test_trial_on_units_learns(tmp_path):
    rows = [(f"p{i // 3}", i % 61, int(i % 61 > 30)) for i in range(1200)]
    data = held_out(tmp_path, rows=rows, k=4)
    tree = trial(data, batch_size=64, epochs=20, evaluate_every=20)
    tree["privacy"] = {"epsilon": 4.0}
    source = parse_yaml(yaml.safe_dump(tree), "x.yaml")
    config = load_trial(source)
    check_trial(config, source)
    trial_dir = TrialDir(tmp_path / "trial")
    with trial_dir.lock():
        trial_dir.make_secret()
        row = train(config, trial_dir, lambda row: None).rows[-1]
    assert row["valid/accuracy"] > 0.8
    assert math.isfinite(row["valid/loss"])


def sensitivity(tmp_path):
    config = TrialConfig.model_validate(trial(section(tmp_path)))
    return {c.name: c for c in check_releases(config, 0.1)}["sensitivity"]


def test_a_unit_moves_a_sum_by_one_clip_norm(tmp_path):
    assert sensitivity(tmp_path).holds


TASKS = {
    "weights": ({"name": "classification", "class_weights": [1e4, 1.0]}, 2),
    "huber": ({"name": "regression", "range": [0, 1], "kind": "huber"}, None),
    "labels": ({"name": "multi_label"}, None),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("method", ["dp_sgd", "disk", "bandmf"])
def test_a_unit_of_any_task_moves_the_sum_over_its_data_by_one_clip_norm(tmp_path, name, method):
    task, num_classes = TASKS[name]
    tree = trial(section(tmp_path, task=task, num_classes=num_classes), dtype="float32")
    bands = {"bands": 2} if method == "bandmf" else {}
    config = TrialConfig.model_validate({**tree, "method": {"name": method, **bands}})
    step = assemble_step(config, Secret.draw(), torch.device("cpu"))
    progress, clip_norm = step.start(initial_params(step)), config.privacy.clip_norm
    step(progress)  # so that a look-ahead has two points
    whole = flat(step.sum_clipped(torch.arange(4), progress))
    for gone in range(4):
        rest = torch.tensor([unit for unit in range(4) if unit != gone])
        moved = float((whole - flat(step.sum_clipped(rest, progress))).norm())
        assert 0.5 * clip_norm < moved <= (1 + 1e-5) * clip_norm


def test_rows_of_a_unit_that_are_clipped_one_by_one_are_caught(tmp_path, monkeypatch):
    """Planted fault."""
    whole = MicrobatchEngine.clipped_sum

    def one_by_one(self, points, weights, inputs_B, targets_B, clip):
        if self.copies == 1:
            return whole(self, points, weights, inputs_B, targets_B, clip)
        parts = []
        for copy in range(K):

            def only(x, copy=copy):
                return torch.stack([x[:, copy]] * K, 1)

            ones = torch.ones_like(targets_B["weights"])
            targets = {"targets": only(targets_B["targets"]), "weights": ones}
            parts.append(whole(self, points, weights, only(inputs_B), targets, clip))
        return {k: sum(part[k] for part in parts) for k in parts[0]}

    monkeypatch.setattr(MicrobatchEngine, "clipped_sum", one_by_one)
    assert not sensitivity(tmp_path).holds


def test_a_batch_of_nobody_is_zero(tmp_path):
    step = step_of(tmp_path)
    progress = step.start(initial_params(step))
    found = step.sum_clipped(torch.arange(0), progress)
    assert not any(x.any() for x in found.values())
    assert take_rows(step.data.targets, torch.arange(0)).keys() == {"targets", "weights"}
