"""A trial killed anywhere and run again in its directory ends as if nothing had happened."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, Diverged, StateError
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Row, Tensors
from dpsweep.methods import METHODS
from dpsweep.privacy.accounting import Run
from dpsweep.training import loop
from dpsweep.training.schedule import TrialSchedule
from dpsweep.training.trial_dir import TrialDir

every_method = pytest.mark.parametrize("method", METHODS)
STEPS = 6  # of batches of a third of the digits: two epochs, a report after each
MODELS = {
    "spectral_dp": {"name": "cnn_small", "width": 5, "block": 5},
    "block_spectral_dp": {"name": "cnn_small", "width": 5, "block": 5},
}
"""What the spectral methods need; cnn_small of width 2 for the others."""


TUNED = {"bandmf": {"bands": 3}}
"""So that the noise has a history."""


def train(config: TrialConfig, trial_dir: TrialDir, report: Any) -> loop.Result:
    """A run as `dpsweep train` begins it: the trial has its secret before the first step."""
    trial_dir.make_secret()
    return loop.train(config, trial_dir, report)


@pytest.fixture(autouse=True)
def _fixed_secret(monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "loop")


def trial(method: str, *, train: dict[str, Any] | None = None, **changes: Any) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": MODELS.get(method, {"name": "cnn_small", "width": 2}),
            "privacy": {"noise_multiplier": 1.0},
            "train": {"batch_size": 479, "epochs": 2, "device": "cpu", **(train or {})},
            "optimizer": {"lr": 0.1, "schedule": {"name": "cosine"}},
            "method": {"name": method, **TUNED.get(method, {})},
            **changes,
        }
    )


class Killed(BaseException):
    """What a test does to a trial; nothing may catch it."""


@dataclass(frozen=True)
class Doomed(TrialDir):
    """A trial directory whose process dies at its `last` checkpoint, before or after saving it."""

    last: int = 1
    written: bool = True
    saved: list[int] = field(default_factory=list)

    def save(self, state: dict[str, Any]) -> None:
        self.saved.append(state["progress"]["step"])
        dies = len(self.saved) == self.last
        if not dies or self.written:
            super().save(state)
        if dies:
            raise Killed


def weights(trial_dir: TrialDir) -> Tensors:
    return torch.load(trial_dir.weights, weights_only=True)


def untimed(rows: list[Row]) -> list[Row]:
    return [{k: x for k, x in row.items() if k != "seconds"} for row in rows]


@cache
def uninterrupted(method: str) -> tuple[list[Row], Tensors]:
    """Rows but for their seconds, and weights, of a trial left in peace."""
    with TemporaryDirectory() as folder:
        trial_dir = TrialDir(Path(folder) / "trial")
        result = train(trial(method), trial_dir, lambda row: None)
        return untimed(result.rows), weights(trial_dir)


def check_equal_to_uninterrupted(method: str, trial_dir: TrialDir, rows: list[Row]) -> None:
    expected_rows, expected = uninterrupted(method)
    assert untimed(rows) == expected_rows
    assert untimed(trial_dir.rows()) == expected_rows
    found = weights(trial_dir)
    assert all(torch.equal(found[k], expected[k]) for k in expected)


def killed_and_resumed(method: str, trial_dir: Doomed) -> None:
    """Trains until the trial directory kills, then again in its folder, and checks what is left."""
    first, second = [], []
    with pytest.raises(Killed):
        train(trial(method), trial_dir, first.append)
    result = train(trial(method), TrialDir(trial_dir.path), second.append)
    assert second == result.rows
    assert first == second[: len(first)]  # what was told before the crash is told again
    check_equal_to_uninterrupted(method, trial_dir, result.rows)


@every_method
@pytest.mark.parametrize(("last", "written"), [(2, True), (7, False)])
def test_trial_killed_between_two_steps_ends_as_if_left_in_peace(
    method, last, written, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)  # a checkpoint after every step
    killed_and_resumed(method, Doomed(tmp_path / "trial", last, written))


@pytest.mark.parametrize(
    ("last", "written"), [*((n, True) for n in range(1, 9)), (1, False), (4, False), (8, False)]
)
def test_it_does_not_matter_at_which_checkpoint(last, written, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    trial_dir = Doomed(tmp_path / "trial", last, written)
    killed_and_resumed("fftkf", trial_dir)
    assert trial_dir.saved == [1, 2, 3, 3, 4, 5, 6, 6][:last]  # one a step, one more a report


@pytest.mark.parametrize(  # after its last report a trial takes no step, whatever its method
    ("method", "epoch"), [*((method, 1) for method in METHODS), ("fftkf", 2)]
)
def test_trial_killed_while_it_reports_ends_as_if_left_in_peace(method, epoch, tmp_path):
    def report(row: Row) -> None:
        if row["epoch"] == epoch:
            raise Killed

    trial_dir = TrialDir(tmp_path / "trial")
    with pytest.raises(Killed):
        train(trial(method), trial_dir, report)
    result = train(trial(method), trial_dir, lambda row: None)
    check_equal_to_uninterrupted(method, trial_dir, result.rows)


def test_trial_that_was_through_is_told_again_and_not_run_again(tmp_path):
    trial_dir, once, again = TrialDir(tmp_path / "trial"), [], []
    train(trial("disk"), trial_dir, once.append)
    result = train(trial("disk"), trial_dir, again.append)
    assert again == once == result.rows  # their seconds too


def killed_at_its_first_report(place: Path, method: str = "bandmf") -> TrialDir:
    """The directory of a trial, by default with correlated noise, half-way."""

    def report(row: Row) -> None:
        raise Killed

    trial_dir = TrialDir(place)
    with pytest.raises(Killed):
        train(trial(method), trial_dir, report)
    return trial_dir


def test_noise_history_is_private_and_gone_with_the_secret(tmp_path):
    trial_dir = killed_at_its_first_report(tmp_path / "trial")
    place = trial_dir.path / "checkpoint.pt"
    assert place.stat().st_mode & 0o777 == 0o600
    history = trial_dir.load()["progress"]["history"]
    assert history["step"] == 3
    assert history["kept"].dtype == torch.float64
    assert len(history["kept"]) == 2  # b - 1
    train(trial("bandmf"), trial_dir, lambda row: None)
    trial_dir.forget()
    left = {path.name for path in trial_dir.path.iterdir()}
    assert left == {"metrics.json", "weights.pt", "confusion.json"}
    assert "history" not in torch.load(trial_dir.weights, weights_only=True)


def test_checkpoint_without_its_noise_history_is_not_trained_on(tmp_path):
    trial_dir = killed_at_its_first_report(tmp_path / "trial")
    state = trial_dir.load()
    del state["progress"]["history"]
    trial_dir.save(state)
    with pytest.raises(StateError, match="has no noise history"):
        train(trial("bandmf"), trial_dir, lambda row: None)


@pytest.mark.parametrize("method", ["dp_sgd", "bandmf"])
def test_run_is_not_finished_by_another_plan_than_it_was_begun_with(method, tmp_path, monkeypatch):
    """Another accountant's noise, or one band in place of three, whose history was dropped."""
    trial_dir = killed_at_its_first_report(tmp_path / "trial", method)
    planned, other = loop.resolve_trial_schedule, {"bandmf": {"correlation": None}}

    def changed(config: TrialConfig) -> TrialSchedule:
        schedule = planned(config)
        weaker = {"run": replace(schedule.plan.run, noise_multiplier=0.9)}
        return replace(schedule, plan=replace(schedule.plan, **other.get(method, weaker)))

    monkeypatch.setattr(loop, "resolve_trial_schedule", changed)
    with pytest.raises(
        StateError, match=r"was begun with sampling rate, noise.*Go on with the ver"
    ):
        train(trial(method), trial_dir, lambda row: None)


def test_seconds_add_up_over_restarts(tmp_path):
    trial_dir = TrialDir(tmp_path / "trial")

    def report(row: Row) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(trial("disk"), trial_dir, report)
    (first,) = trial_dir.load()["rows"]
    rows = train(trial("disk"), trial_dir, lambda row: None).rows
    assert rows[0] == first
    assert rows[1]["seconds"] >= first["seconds"]


def test_secret_is_on_disk_before_anything_is_asked_of_the_data(tmp_path):
    @dataclass(frozen=True)
    class Watched(TrialDir):
        def load(self) -> dict[str, Any] | None:
            assert (self.path / "secret").exists()
            raise Killed

    with pytest.raises(Killed):
        train(trial("disk"), Watched(tmp_path / "trial"), lambda row: None)


def test_rows_are_on_disk_before_they_are_reported(tmp_path):
    trial_dir = TrialDir(tmp_path / "trial")

    def report(row: Row) -> None:
        assert trial_dir.load()["rows"][-1] == row
        assert trial_dir.rows()[-1] == row
        assert trial_dir.weights.exists() == (row["step"] == STEPS)

    train(trial("fftkf"), trial_dir, report)


def test_checkpoint_holds_no_secret(tmp_path):
    trial_dir = TrialDir(tmp_path / "trial")
    train(trial("fftkf"), trial_dir, lambda row: None)
    key = Secret.fixed("loop").key
    for place in trial_dir.path.iterdir():
        assert (key in place.read_bytes()) == (place.name == "secret")


@pytest.mark.parametrize(
    ("epochs", "every", "reports"),
    [
        (2, 1, [(1, 3), (2, 6)]),
        (3, 2, [(2, 6), (3, 9)]),
        (2, 5, [(2, 6)]),
        (1.5, 1, [(1, 3), (2, 4)]),
        (0.01, 1, [(1, 1)]),
    ],
)
def test_reports_come_every_so_many_epochs_and_at_the_end(epochs, every, reports, tmp_path):
    config = trial("dp_sgd", train={"epochs": epochs, "evaluate_every": every})
    rows = train(config, TrialDir(tmp_path / "trial"), lambda row: None).rows
    assert [(row["epoch"], row["step"]) for row in rows] == reports


def test_epsilon_spent_rises_to_the_promise_and_never_above(tmp_path):
    config = trial("disk", train={"epochs": 4}, privacy={"epsilon": 2.0})
    result = train(config, TrialDir(tmp_path / "trial"), lambda row: None)
    spent = [row["privacy/epsilon_spent"] for row in result.rows]
    assert spent == sorted(set(spent))
    assert spent[-1] == result.plan.epsilon <= 2.0
    run = result.plan.run
    for row, epsilon in zip(result.rows, spent, strict=True):
        so_far = Run(run.sampling_rate, run.noise_multiplier, row["step"])
        assert epsilon == pytest.approx(so_far.epsilon(result.plan.delta), abs=0.02)


def test_fixed_secret_makes_the_result_void_and_a_drawn_one_does_not(tmp_path, monkeypatch):
    assert train(trial("dp_sgd"), TrialDir(tmp_path / "fixed"), lambda row: None).void
    monkeypatch.delenv("DPSWEEP_TEST_SECRET")
    assert not train(trial("dp_sgd"), TrialDir(tmp_path / "drawn"), lambda row: None).void


def test_drawn_secrets_give_two_trials_different_noise(tmp_path, monkeypatch):
    monkeypatch.delenv("DPSWEEP_TEST_SECRET")
    trial_dirs = [TrialDir(tmp_path / name) for name in ("one", "two")]
    for trial_dir in trial_dirs:
        train(trial("dp_sgd"), trial_dir, lambda row: None)
    one, two = map(weights, trial_dirs)
    assert all((one[k] != two[k]).any() for k in one)


@every_method
def test_silly_learning_rate_is_told_as_divergence(method, tmp_path):
    trial_dir, rows = TrialDir(tmp_path / "trial"), []
    config = trial(method, optimizer={"lr": 2e37})  # float32 ends at 3.4e38
    with pytest.raises(Diverged, match=r"stopped being finite by epoch \d .*optimizer\.lr 2e\+37"):
        train(config, trial_dir, rows.append)
    assert not trial_dir.weights.exists()
    assert all(row["valid/loss"] < float("inf") for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_cuda_that_is_not_there_is_refused(tmp_path):
    config = trial("dp_sgd", train={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"train\.device: cuda, and torch sees no CUDA device"):
        train(config, TrialDir(tmp_path / "trial"), lambda row: None)


OTHER = {
    "model": {"name": "cnn_small", "width": 3},
    "privacy": {"epsilon": 3.0, "clip_norm": 0.3, "clipping": "automatic"},
    "train": {"batch_size": 300, "epochs": 1, "device": "cpu", "dtype": "float64"},
    "data": {"name": "digits", "validation": "holdout"},
    "seed": 5,
}


@every_method
def test_trial_after_another_in_one_process_is_what_it_is_alone(method, tmp_path):
    uninterrupted(method)
    other = "fftkf" if method != "fftkf" else "dp_adam"
    train(trial(other, **OTHER), TrialDir(tmp_path / "before"), lambda row: None)
    trial_dir = TrialDir(tmp_path / "after")
    result = train(trial(method), trial_dir, lambda row: None)
    check_equal_to_uninterrupted(method, trial_dir, result.rows)


FRESH = """
import sys
import time
from pathlib import Path
from dpsweep.config.trial import TrialConfig
from dpsweep.training.loop import train
from dpsweep.training.schedule import TrialSchedule
from dpsweep.training.trial_dir import TrialDir
heavy = {"ray", "optuna", "mlflow"} & set(sys.modules)
assert not heavy, f"training imports {heavy}"
config = TrialConfig.model_validate_json(sys.argv[1])
trial_dir = TrialDir(Path(sys.argv[2]))
trial_dir.make_secret()
train(config, trial_dir, lambda row: None)
"""


@pytest.mark.slow
@every_method
def test_fresh_process_trains_the_same_weights_without_ray_optuna_or_mlflow(method, tmp_path):
    trial_dir = TrialDir(tmp_path / "fresh")
    command = [sys.executable, "-c", FRESH, trial(method).model_dump_json(), str(trial_dir.path)]
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as here
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_equal_to_uninterrupted(method, trial_dir, trial_dir.rows())


def test_trial_that_is_paused_between_two_reports_ends_as_if_left_in_peace(tmp_path, monkeypatch):
    """Asked at every step in turn, those included that end an epoch or the trial."""
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.0)
    trial_dir, paused_at, told = TrialDir(tmp_path / "trial"), [], []
    trial_dir.make_secret()
    for last in (1, 2, 2, 1, 3):
        looks = iter(range(1, 100))
        with pytest.raises(loop.Paused):
            loop.train(trial("fftkf"), trial_dir, told.append, lambda n=last, i=looks: next(i) == n)
        paused_at.append(trial_dir.load()["progress"]["step"])
        if paused_at[-1] == STEPS:
            break
    assert paused_at == [1, 3, 5, 6]
    assert [row["epoch"] for row in untimed(trial_dir.load()["rows"])] == [1]
    result = loop.train(trial("fftkf"), trial_dir, told.append)
    check_equal_to_uninterrupted("fftkf", trial_dir, result.rows)
    assert {row["epoch"] for row in told} == {1, 2}
    assert not list(trial_dir.path.glob(".*")), "no debris"


@every_method
def test_every_method_goes_on_from_a_pause_as_if_left_in_peace(method, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.0)
    trial_dir, looks = TrialDir(tmp_path / "trial"), iter(range(1, 100))
    trial_dir.make_secret()
    with pytest.raises(loop.Paused):
        loop.train(trial(method), trial_dir, lambda row: None, lambda: next(looks) == 5)
    assert trial_dir.load()["progress"]["step"] == 5
    assert not trial_dir.weights.exists()
    result = loop.train(trial(method), trial_dir, lambda row: None)
    check_equal_to_uninterrupted(method, trial_dir, result.rows)


def test_trial_pauses_within_a_second_of_being_asked(tmp_path, monkeypatch):
    """No report comes in that time; what is saved is the step it was at."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: 0.01 * next(ticks))  # so slow are a step's looks
    monkeypatch.setattr(loop, "time", clock)
    trial_dir, asked = TrialDir(tmp_path / "trial"), []
    config = trial("dp_sgd", train={"epochs": 5000, "evaluate_every": 5000})
    trial_dir.make_secret()
    request = tmp_path / "stop"

    def look() -> bool:
        if not asked:  # at the first look, so that the second one finds it
            request.touch()
            asked.append(clock.monotonic())
            return False
        return request.exists()

    with pytest.raises(loop.Paused):
        loop.train(config, trial_dir, lambda row: None, look)
    assert clock.monotonic() - asked[0] < 1.0  # half of it to the next look
    saved = trial_dir.load()
    assert saved["progress"]["step"] > 0
    assert saved["rows"] == []
    assert trial_dir.rows() == []


def test_trial_that_nobody_asks_to_pause_is_not_looked_for_at_every_step(tmp_path):
    looks = []

    def look() -> bool:
        looks.append(time.monotonic())
        return len(looks) == 3

    trial_dir = TrialDir(tmp_path / "trial")
    trial_dir.make_secret()
    config = trial("dp_sgd", train={"epochs": 5000, "evaluate_every": 5000})
    with pytest.raises(loop.Paused):
        loop.train(config, trial_dir, lambda row: None, look)
    assert all(b - a >= loop._LOOK_SECONDS for a, b in pairwise(looks))
    assert trial_dir.load()["progress"]["step"] > len(looks)


def test_confusion_matrix_counts_public_validation_data_and_no_held_out_example(tmp_path):
    """How many held-out examples have each label is private."""
    rows = list[Row]()
    public = TrialDir(tmp_path / "public")
    train(trial("dp_sgd"), public, rows.append)
    found = public.confusion()
    assert found is not None
    assert found.classes == tuple("0123456789")
    total = sum(map(sum, found.counts))
    assert total == 360
    right = sum(row[i] for i, row in enumerate(found.counts))
    assert right / total == pytest.approx(rows[-1]["valid/accuracy"])
    held = TrialDir(tmp_path / "held")
    train(trial("dp_sgd", data={"name": "digits", "validation": "holdout"}), held, rows.append)
    assert held.weights.exists()
    assert held.confusion() is None


def test_a_trial_directory_older_than_what_was_reported_elsewhere_is_not_gone_on_with(tmp_path):
    """As after a restored backup: steps that others saw the result of would be released again."""
    config, trial_dir = trial("dp_sgd"), TrialDir(tmp_path / "trial")
    rows: list[Row] = []

    def die_after_first(row: Row) -> None:
        rows.append(row)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, trial_dir, die_after_first)
    with pytest.raises(StateError, match="epoch 2 was reported, and the checkpoint of it is gone"):
        loop.train(config, trial_dir, rows.append, reported=2)
    loop.train(config, trial_dir, rows.append, reported=1)
    assert rows[-1]["epoch"] == 2
