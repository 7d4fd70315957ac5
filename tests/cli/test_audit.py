"""`dpsweep audit` as its user runs it: a table, rows for programs, and an exit code."""

import json

import pytest
from typer.testing import CliRunner

import dpsweep.training.step
from dpsweep.cli import app
from dpsweep.cli.verbs import audit
from dpsweep.config.trial import dump_trial
from dpsweep.privacy.audit import bound_epsilon
from dpsweep.training.audit import Plan, sample_scores


def in_this_process(plan: Plan):
    """The audit without its worker processes, which a patch would not reach."""
    absent, present = sample_scores(plan, plan.runs)
    return bound_epsilon(
        plan.config.method.name, absent, present, plan.epsilon, plan.delta, plan.confidence
    )


def test_a_sound_method_holds_and_its_row_says_so():
    args = ["audit", "dp_sgd", "--runs", "40", "--steps", "1", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)
    assert (row["method"], row["claimed"], row["runs"]) == ("dp_sgd", 4.0, 40)
    assert row["lower"] <= 4.0


def test_a_violated_claim_exits_with_1(monkeypatch):
    sound = dpsweep.training.step.release

    def weakened(clipped, *, noise_multiplier, **rest):
        return sound(clipped, noise_multiplier=0.3 * noise_multiplier, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    monkeypatch.setattr(audit, "audit_plan", in_this_process)
    done = CliRunner().invoke(app, ["audit", "dp_sgd", "--runs", "100", "--steps", "1"])
    assert done.exit_code == 1
    assert "VIOLATED" in done.output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "privacy.clipping={name: per_layer, bounds: {a: 1}}",
            "privacy.clipping.bounds: name layers",
        )
    ],
)
def test_what_the_audits_own_model_has_not_is_refused(setting, message):
    done = CliRunner().invoke(app, ["audit", "dp_sgd", "--set", setting])
    assert message in str(done.exception)


@pytest.fixture
def trial_file(tmp_path):
    tree = dump_trial(audit._configs("dp_sgd", [])[0])
    place = tmp_path / "own.yaml"
    place.write_text(tree)
    return place


def test_a_config_is_checked_by_its_own_step(trial_file):
    for args in (["audit", str(trial_file)], ["check", str(trial_file), "--deep"]):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.output
        for name in ("noise", "sensitivity", "divisor", "sampling"):
            assert f"{name} " in done.output
        assert "VIOLATED" not in done.output


def test_of_a_sweep_the_step_of_one_of_its_trials_is_checked(sweep_file):
    """Also where epsilon is the whole sweep's: its trials have the noise of their shares."""
    for scope in ("trial", "sweep"):
        args = ["audit", str(sweep_file), "--set", f"privacy.scope={scope}"]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.output
        assert "sensitivity " in done.output
        assert "VIOLATED" not in done.output


def test_a_config_whose_noise_is_weak_exits_with_1(trial_file, monkeypatch):
    sound = dpsweep.training.step.release

    def weakened(clipped, *, noise_multiplier, **rest):
        return sound(clipped, noise_multiplier=0.9 * noise_multiplier, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    for args in (["audit", str(trial_file)], ["check", str(trial_file), "--deep"]):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 1
        assert "VIOLATED" in done.output


def test_power_and_each_canary_are_told(monkeypatch):
    monkeypatch.setattr(audit, "audit_plan", in_this_process)
    args = ["audit", "dp_sgd", "--runs", "20", "--steps", "1"]
    done = CliRunner().invoke(app, [*args, "--canary", "bright", "--canary", "noise"])
    assert "dp_sgd, bright canary" in done.output
    assert "dp_sgd, noise canary" in done.output
    assert "Noise at 0.9 of what is claimed would be found in 0% of such audits" in done.output
    wrong = CliRunner().invoke(app, ["audit", "dp_sgd", "--canary", "yellow"])
    assert "yellow" in str(wrong.exception)


def test_audit_by_one_run_says_how_many_guesses_were_right():
    done = CliRunner().invoke(app, ["audit", "dp_sgd", "--one-run", "60", "--steps", "1"])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "one run of 1 steps with 60 canaries" in text
    assert "Noise at 0.9 of what is claimed would be found in at most 0% of such audits" in text


def test_adaptive_clipping_can_be_audited():
    plan = Plan(audit._configs("dp_sgd", ["privacy.clipping=adaptive"])[0], steps=2)
    absent, present = sample_scores(plan, 20)
    assert len(absent) == len(present) == 20
