"""A table in print, run again: its cells are sweeps that can be launched, and it can be resumed."""

import json
from dataclasses import replace
from functools import partial

import pytest
import yaml

from dpsweep.app.reproduce import (
    Budget,
    epsilons_of,
    job_of,
    markdown,
    result_of,
    spec_of,
)
from dpsweep.cli.verbs import reproduce
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.results import published
from dpsweep.results.published import Table, cells, table, tables
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.check import check_parts

TINY = """\
tiny:
  source: "Nobody, Table 1"
  notes: ["A note."]
  base:
    data: {name: digits}
    model: {name: linear}
    privacy: {epsilon: 4, delta: auto}
    train: {batch_size: 256, epochs: 9, evaluate_every: 5}
    optimizer: {lr: 1.0}
  search: {optimizer.lr: {log_uniform: [0.3, 3]}, train.batch_size: {choice: [128, 256]}}
  rows:
    here: {published: {train.epochs: 9, train.batch_size: 256}}
    away: {set: {data: {name: mnist, root: nowhere}}}
  columns: {accuracy: {}}
  methods: {dp_sgd: {set: {method: {name: dp_sgd}}}}
  cells: {here: {accuracy: {dp_sgd: 90.0}}, away: {accuracy: {dp_sgd: 95.0}}}
  beside: {here: {accuracy: {not private: 99.0}}}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A table of two cells, of which one has no data; the working folder is tmp_path."""
    place = tmp_path / "published.yaml"
    place.write_text(TINY)
    monkeypatch.setattr(published, "_FILE", place)
    monkeypatch.chdir(tmp_path)
    tables.cache_clear()
    yield
    tables.cache_clear()


def wish(**more):
    asked = {"rows": [], "columns": [], "methods": [], "epsilons": [], "settings": []}
    asked |= {"state": "state", "address": None, "tracking_uri": None, "out": None}
    asked |= {"budget": "trials=2,epochs=1,batch_size=200", "seeds": 2}
    asked |= {"accept": False, "fetch": False, "quiet": True}
    return reproduce.ReproduceOptions(**({"table": "tiny"} | asked | more))


def write_model(place, *, language):
    """A small model's config and a tokenizer in a folder; the settings that name it."""
    vocab = {"<|endoftext|>": 0, "a": 1}
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "model_type": "roberta", "max_position_embeddings": 200}
    if language:
        config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 32, "n_layer": 1, "n_head": 2}
    (place / "config.json").write_text(json.dumps(config))
    return [f"model.folder={place}", f"data.tokenizer={place}"]


@pytest.mark.parametrize("name", ["disk_table1", "disk_table3", "disk_table4"])
def test_a_cell_whose_weights_are_absent_says_which_folder_to_give(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = cells(name)[0]
    with pytest.raises(reproduce._Obstacle, match=r"Folders of yours: (roberta-base|gpt2).*--set"):
        reproduce._ready(job_of(cell, {}), wish(table=name), Budget())


def test_a_figure_is_in_percent_as_its_metric_has_it():
    percents = {c.column: c.percent for c in cells("disk_table4")}
    assert percents == {"bleu": 1.0, "rouge_l": 100.0}
    assert cells("disk_table1")[0].percent == 100.0


@pytest.mark.parametrize("name", tables())
def test_every_row_column_and_method_of_every_table_is_a_sweep_that_fits(name, tmp_path):
    epsilons = {} if cells(name)[0].epsilon else dict.fromkeys(table(name).rows, 4.0)
    weights = []
    if table(name).needs:
        pytest.importorskip("transformers", reason="extra text")
        weights = write_model(tmp_path / "model", language=name == "disk_table4")
    seen = set()
    for cell in cells(name):
        pairs = {(cell.row, cell.method), (cell.column, cell.method)}
        if cell.missing or pairs <= seen:
            continue
        seen |= pairs
        job = job_of(cell, epsilons)
        file = tmp_path / f"{job.name}.yaml"
        file.write_text(yaml.safe_dump(spec_of(job, Budget(), 3)))
        sweep = load_sweep(file, weights)
        assert sweep.name == job.name
        assert sweep.written.privacy.epsilon == job.epsilon
        assert sweep.written.method.name in (cell.method, f"block_{cell.method}")
        assert sweep.num_runs == 8 + 3
        sweep.check_trials(partial(check_parts, source=sweep.origin))
        assert sweep.config.objective.metric == cell.objective
    whole = table(name)
    if set(whole.missing) == {*whole.rows}:
        return
    parts = {part for pair in seen for part in pair}
    assert parts | set(whole.missing) == {*whole.rows, *whole.columns, *whole.methods}


def test_figures_are_those_in_print():
    """One of each table, by hand from the papers."""
    figures = {
        ("fftkf_table1", "wrn_28_4", "cifar100", "disk"): 37.79,
        ("disk_table1", "roberta_base_eps6.7", "qnli", "disk"): 88.9,
        ("disk_table3", "roberta_large_eps1", "sst2", "dp_adam"): 90.9,
        ("disk_table4", "eps3", "bleu", "disk"): 68.35,
        ("disk_table5", "eps8", "rouge_l", "dp_adam"): 54.58,
        ("disk_table6", "cifar100_wrn_16_4_eps4", "accuracy", "disk"): 37.1,
        ("dp_pmlf_table1_vit", "larger", "cifar10", "innerouter"): 33.53,
        ("dp_pmlf_table3_resnet18", "smaller", "cifar10", "dp_pmlf"): 47.95,
        ("spectral_dp_table1", "mnist_lenet5", "accuracy", "dp_sgd"): 95.95,
        ("spectral_dp_table2", "eps7", "filtered0.5", "spectral_dp"): 66.56,
        ("spectral_dp_table4", "eps1", "filtered0.875", "block_spectral_dp"): 96.29,
    }
    for (name, row, column, method), figure in figures.items():
        (cell,) = cells(name, [row], [column], [method])
        assert cell.published == figure
    assert {name for name, *_ in figures} == set(tables())


def test_a_filtered_fraction_is_what_is_not_kept():
    for name, key in (("spectral_dp_table2", "keep"), ("spectral_dp_table4", "keep_circulant")):
        for cell in cells(name):
            ours = cell.tree["method"][key]
            printed = cell.settings.get(f"method.{key}", ours)
            assert printed == 1 - float(cell.column.removeprefix("filtered"))
            assert ours == printed or ours == 1 / 5  # Model2's last layer has 5 frequencies


def test_unknown_tables_rows_columns_and_methods_are_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown table 'fftkf_tabel1'. Did you mean 'fftkf_tab"):
        table("fftkf_tabel1")
    with pytest.raises(ConfigError, match=r"fftkf_table1: --rows: unknown row 'cnn'. Did you mean"):
        cells("fftkf_table1", rows=["cnn"])
    with pytest.raises(ConfigError, match=r"--columns: unknown column 'cifar'"):
        cells("fftkf_table1", columns=["cifar"])
    with pytest.raises(
        ConfigError, match=r"--methods: unknown method 'dp_sgd'. Did you mean 'dp_a"
    ):
        cells("fftkf_table1", methods=["dp_sgd"])


def test_budgets_are_read_and_mistakes_in_them_told():
    assert Budget.of("trials=3,epochs=0.5,batch_size=64,hours=2") == Budget(
        trials=3, epochs=0.5, batch_size=64, hours=2
    )
    assert Budget.of("") == Budget(trials=8)
    with pytest.raises(ConfigError, match=r"--budget: unknown key 'trial'. Did you mean 'trials'"):
        Budget.of("trial=3")
    with pytest.raises(ConfigError, match=r"--budget trials: expected KEY=VALUE"):
        Budget.of("trials")
    with pytest.raises(ConfigError, match=r"--budget.*trials.*many"):
        Budget.of("trials=many")


def test_a_budget_in_print_stays_and_a_lost_one_is_asked_for():
    lost, known = cells("dp_pmlf_table1_vit")[0], cells("fftkf_table1")[0]
    assert "--epsilon smaller=4" in job_of(lost, {}).obstacle
    given = epsilons_of(["4", "smaller=1"], table("dp_pmlf_table1_vit"), "dp_pmlf_table1_vit")
    assert given == {"smaller": 1.0, "larger": 4.0}
    assert job_of(lost, given).name.endswith("smaller.mnist.dp_sgd.eps1")
    with pytest.raises(ConfigError, match=r"--epsilon 1: fftkf_table1 .* in the paper \(4"):
        job_of(known, {"cnn5": 1.0})
    for wrong in ("smaller=0", "nan", "much"):
        with pytest.raises(ConfigError, match=f"--epsilon {wrong}: expected a number above 0"):
            epsilons_of([wrong], table("dp_pmlf_table1_vit"), "dp_pmlf_table1_vit")
    with pytest.raises(ConfigError, match=r"--epsilon: unknown row 'small'"):
        epsilons_of(["small=1"], table("dp_pmlf_table1_vit"), "dp_pmlf_table1_vit")


def test_a_result_says_what_differs_from_print(tiny, tmp_path):
    (cell,) = cells("tiny", rows=["here"])
    job = job_of(cell, {})
    file = tmp_path / "cell.yaml"
    file.write_text(yaml.safe_dump(spec_of(job, Budget.of("trials=2,epochs=3"), 2)))
    study = Study.create(f"sqlite:///{tmp_path}/study.db", load_sweep(file))
    assert result_of(job, study).remark == "no trial yet"
    for accuracy in (0.5, 0.9):
        end(study, study.ask(), accuracy)
    for accuracy in (0.80, 0.84):
        end(study, study.ask_to_confirm(), accuracy)
    result = result_of(job, study)
    assert (result.mean, result.best, result.trials) == (pytest.approx(82.0), 90.0, 2)
    assert result.spread == pytest.approx(2.828, abs=1e-3)
    assert (result.seconds, result.epsilon) == (8.0, 4)
    assert "epochs 3 (published: 9)" in result.differs
    told = markdown("tiny", table("tiny"), [result, replace(result, values=())])
    assert "| 90.00 (not private 99) | 82.00 | 2.83 | 2 | -8.00 | 2 | 8 | epochs 3" in told
    assert "- A note." in told


def end(study, asked, accuracy):
    row = {"epoch": 3, "step": 22, "valid/accuracy": accuracy, "valid/loss": 1.0}
    row |= {"noise_multiplier": 1.2, "privacy/epsilon_spent": 1.0, "seconds": 2.0}
    study.report(asked.number, row)
    study.tell(asked.number, "complete")


def test_cells_without_data_are_skipped_with_a_reason_and_an_exit_code(tiny, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        reproduce.run(wish(rows=["away"]))
    assert ended.value.code == 1
    (row,) = json.loads((tmp_path / "reproduction/tiny/tiny.json").read_text())
    assert row["mean"] is None
    assert "does not hold mnist" in row["remark"]
    assert "skipped: " in (tmp_path / "reproduction/tiny/tiny.md").read_text()
    assert "warning: tiny.away.accuracy.dp_sgd: skipped" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_too_few_seeds_and_an_empty_choice_are_told(tiny):
    with pytest.raises(ConfigError, match="--seeds 1: give at least 2"):
        reproduce.run(wish(seeds=1))
    sparse = Table.model_validate(table("tiny").model_dump() | {"cells": {"here": {}}})
    tables()["tiny"] = sparse
    with pytest.raises(ConfigError, match="tiny: no cell has this row"):
        reproduce.run(wish())


@pytest.mark.ray
@pytest.mark.slow
def test_a_table_is_run_and_run_again_from_where_it_was(tiny, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        reproduce.run(wish())
    assert ended.value.code == 1, "a cell has no data"
    here, away = json.loads((tmp_path / "reproduction/tiny/tiny.json").read_text())
    assert len(here["values"]) == 2
    assert (here["trials"], away["trials"]) == (2, 0)
    assert here["differs"] == ["epochs 1 (published: 9)", "batch_size 200 (published: 256)"]
    assert (tmp_path / "reproduction/tiny/tiny.here.accuracy.dp_sgd.best.yaml").exists()
    reproduce.run(wish(rows=["here"]))
    (again,) = json.loads((tmp_path / "reproduction/tiny/tiny.json").read_text())
    assert again == here, "nothing ran twice"
    with pytest.raises(SystemExit):
        reproduce.run(wish(rows=["away"]))
    assert json.loads((tmp_path / "reproduction/tiny/tiny.json").read_text()) == [here, away]
    with pytest.raises(StateError, match=r"budget.trials: 2 -> 3.*--accept-changes"):
        reproduce.run(wish(rows=["here"], budget="trials=3,epochs=1,batch_size=200"))
    reproduce.plan(wish(rows=["here"]))
    assert "nothing was trained. The sweep files" in capsys.readouterr().out


def test_a_table_shows_cells_that_were_begun_under_other_budgets(tmp_path):
    name = cells("dp_pmlf_table1_vit")[0].name
    folder = StateFolder.at(str(tmp_path / "state")).sweep(f"{name}.eps1").path
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    asked = replace(wish(state=str(tmp_path / "state")), table="dp_pmlf_table1_vit")
    assert [job.name for job in asked.shown([])] == [f"{name}.eps1"]


def test_a_cell_that_cannot_be_read_or_has_no_data_costs_no_other_its_figure(tiny, tmp_path):
    folder = StateFolder.at(str(tmp_path / "state")).sweep("tiny.here.accuracy.dp_sgd").path
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    with pytest.raises(SystemExit):
        reproduce.run(wish(rows=["away"]))
    here, away = json.loads((tmp_path / "reproduction/tiny/tiny.json").read_text())
    assert here["remark"].startswith("cannot be read: ")
    assert away["remark"].startswith("skipped: ")
