"""A budget that runs share is kept by what is really dispatched, and each planted fault is caught.

| fault | caught by | which says |
|---|---|---|
| the final run calibrated as if exploring were free | check_spent | spends more |
| each exploring trial given the share that is for all of them | check_spent | spends more |
| a second final run after the first one failed | check_spent | spends more |
| the final run charged at the exploring trials' noise | check_ledger | charged |
| a trial of the search asked for after the final run | check_order | after the final run |
| private selection: delta not divided among the runs | check_selection | claims less |
| private selection: e_1 counted once | check_selection | claims less |

The checks compose with dp-accounting's own accountant, not with ours.
"""

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dpsweep.config.plan import plan_privacy
from dpsweep.config.sweep import load_sweep
from dpsweep.privacy import search_budget
from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.profiles import ProfileCap
from dpsweep.search import charge
from dpsweep.store import study as study_module
from dpsweep.store.study import Study

SETTINGS = ["privacy.scope=sweep", "budget={explore: {trials: 4, share: 0.2}}"]


def run_sweep(study, *, early=False):
    """Ask for every run that the study would dispatch; the final one fails."""
    explored = 0
    while True:
        explores = study.num_to_ask() and not (early and explored == 2)
        asked = study.ask() if explores else study.ask_to_confirm()
        if asked is None:
            return
        explored += bool(explores)
        study.dispatch(asked, void=False)
        row = {"epoch": 1, "step": 11, "valid/accuracy": 0.5, "valid/loss": 1.0, "seconds": 1.0}
        row |= {"noise_multiplier": 1.0, "privacy/epsilon_spent": 1.0}
        study.report(asked.number, row)
        study.tell(asked.number, "failed" if asked.final else "complete")


def epsilon_of(runs, delta):
    """Composition by dp-accounting."""
    accountant = PLDAccountant()
    for run in runs:
        step = dp_event.GaussianDpEvent(run.noise_multiplier)
        accountant.compose(dp_event.PoissonSampledDpEvent(run.sampling_rate, step), run.steps)
    return accountant.get_epsilon(delta)


def check_spent(study):
    """What was trained, by its configs, keeps epsilon."""
    runs = [plan_privacy(record.config).run for record in study.records()]
    spent = epsilon_of(runs, study.sweep.written.delta)
    assert spent <= 4 * 1.001, f"spends more: {spent:.3f} of 4"


def check_ledger(study):
    """Every run is charged what it trains with."""
    for record in study.records():
        run = plan_privacy(record.config).run
        assert record.charged == {
            "sampling_rate": run.sampling_rate,
            "noise_multiplier": run.noise_multiplier,
            "steps": run.steps,
        }, f"trial {record.number} is charged otherwise"


def check_order(study):
    """No exploring trial comes after the final run."""
    finals = [record.number for record in study.records() if record.final]
    others = [record.number for record in study.records() if not record.final]
    assert len(finals) == 1
    assert max(others) < finals[0], "an exploring trial after the final run"


def check_selection():
    """The reference figures of the proof, where the next smaller claim would be another's."""
    run = Run(0.02, 4.145, 2500)
    claimed = ProfileCap.over([run], 10, 1e-5).epsilon
    assert claimed > 1.48, f"claims less: {claimed:.3f}"


CHECKS = {f.__name__: f for f in (check_spent, check_ledger, check_order)}


def final_for_free(patch):
    def levels(epsilon, delta, schedule, num_exploring, share):
        found = explore_noise(epsilon, delta, schedule, num_exploring, share)
        steps, rate = schedule
        return found[0], calibrate_noise(epsilon, delta, rate, steps)[0].noise_multiplier

    explore_noise = search_budget.explore_noise
    patch.setattr(search_budget, "explore_noise", levels)


def share_for_each(patch):
    def levels(epsilon, delta, schedule, num_exploring, share):
        return explore_noise(epsilon, delta, schedule, 1, share)

    explore_noise = search_budget.explore_noise
    patch.setattr(search_budget, "explore_noise", levels)


def second_final(patch):
    chosen = Study._chosen_for_final

    def again(self, records):
        finals = sum(record.final for record in records)
        return chosen(self, [r for r in records if not r.final]) if finals < 2 else None

    patch.setattr(Study, "_chosen_for_final", again)


def final_charged_as_exploring(patch):
    def entry(config):
        found = charge.make_ledger_entry(config)
        return found | {"noise_multiplier": max(found["noise_multiplier"], 2.0)}

    patch.setattr(study_module, "make_ledger_entry", entry)


def never_ended(patch):
    patch.setattr(Study, "_has_ended", lambda self: False)


FAULTS = {
    "final-for-free": (final_for_free, "check_spent", "spends more", False),
    "share-for-each": (share_for_each, "check_spent", "spends more", False),
    "second-final": (second_final, "check_spent", "spends more", True),
    "final-charged-as-exploring": (
        final_charged_as_exploring,
        "check_ledger",
        "charged otherwise",
        False,
    ),
    "never-ended": (never_ended, "check_order", "after the final run", True),
}


@pytest.fixture
def study(uri, sweep_file):
    search_budget._compute_noise.cache_clear()
    yield lambda: Study.create(uri, load_sweep(sweep_file, SETTINGS))
    search_budget._compute_noise.cache_clear()


@pytest.mark.parametrize("early", [False, True], ids=["whole", "out-of-time"])
def test_what_is_dispatched_keeps_the_budget(study, early):
    made = study()
    run_sweep(made, early=early)
    if early:  # a resume asks again, and gets nothing
        run_sweep(made)
    for check in CHECKS.values():
        check(made)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_the_allocation_is_caught(study, monkeypatch, name):
    plant, check, words, early = FAULTS[name]
    plant(monkeypatch)
    made = study()
    run_sweep(made, early=early)
    if early:
        run_sweep(made)
    with pytest.raises(AssertionError, match=words):
        CHECKS[check](made)


def test_private_selection_claims_what_its_proof_allows():
    check_selection()


@pytest.mark.parametrize("fault", ["delta", "e_1"])
def test_each_fault_of_the_selection_is_caught(monkeypatch, fault):
    from dpsweep.privacy import profiles

    if fault == "delta":
        found = profiles._epsilon_of
        monkeypatch.setattr(profiles, "_epsilon_of", lambda run, delta: found(run, 10 * delta))
    else:
        monkeypatch.setattr(ProfileCap, "epsilon", property(lambda self: sum(self.epsilons)))
    with pytest.raises(AssertionError, match="claims less"):
        check_selection()
