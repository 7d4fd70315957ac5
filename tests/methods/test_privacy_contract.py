"""The five points that make a method private, checked for every one through the real step.

They stand in METHODS.md, section 1. A new method joins CONFIGS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from scipy import stats
from torch import nn

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.data.datasets import DataConfig
from dpsweep.data.models import build as build_model
from dpsweep.data.read import Dataset, load
from dpsweep.filters.base import Public, State
from dpsweep.methods import METHODS
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.clip import Clip
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.train.budget import Budget
from dpsweep.train.evaluate import evaluate
from dpsweep.train.loop import train
from dpsweep.train.room import Room
from dpsweep.train.step import Progress, Step

CONFIGS = {
    "dp_sgd": {"name": "dp_sgd"},
    "dp_adam": {"name": "dp_adam"},
    "disk-printed": {"name": "disk", "kappa": 0.7, "gamma": 0.5},
    "disk-weights-of-both-signs": {"name": "disk", "kappa": 0.3, "gamma": 0.5},
    "disk-behind": {"name": "disk", "kappa": 0.5, "gamma": -1.0},
    "disk-one-point-ahead": {"name": "disk", "kappa": 0.4, "gamma": 1.5},
    "fftkf": {"name": "fftkf", "kappa": 0.3, "gamma": 0.5, "cut": 0.4, "depth": 0.6},
}
SIGNED = ["disk-weights-of-both-signs", "disk-behind", "fftkf"]
"""Those whose weights have an absolute sum above 1, so that clipping first would show."""

every_method = pytest.mark.parametrize("method", CONFIGS.values(), ids=CONFIGS)
every_clipping = pytest.mark.parametrize("clipping", ["flat", "automatic"])

CLIP_NORM = 0.5
BATCH_SIZE = 5  # B, on purpose not the number of examples: dividing by |S_t| would show
NUM_EXAMPLES = 12


@dataclass
class Tap:
    """A filter that changes nothing and keeps every release that flows through."""

    seen: list[Released] = field(default_factory=list)
    noise_gain: float = 1.0

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        self.seen.append(Released({k: g.clone() for k, g in grad.items()}))
        return grad, None


@dataclass(frozen=True)
class Noting(VmapEngine):
    """The engine itself, keeping the points it is asked at."""

    asked: list[list[Tensors]] = field(default_factory=list)

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: torch.Tensor,
        targets_B: torch.Tensor,
        clip: Clip,
    ) -> Clipped:
        self.asked.append([{k: x.clone() for k, x in point.items()} for point in points])
        return super().clipped_sum(points, weights, inputs_B, targets_B, clip)


def network() -> nn.Module:
    """243 weights in four tensors, bent enough for gradients to differ from point to point."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def examples(num: int = NUM_EXAMPLES, seed: int = 0) -> Dataset:
    """Images of 4x4 noise with labels that have nothing to do with them."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 17, (num, 1, 4, 4), generator=rng, dtype=torch.uint8)
    targets = torch.randint(0, 3, (num,), generator=rng)
    return Dataset(inputs, targets, inputs[:0], targets[:0], brightest=16)


def without(data: Dataset, i: int) -> Dataset:
    """The neighbouring data set that lacks example `i`."""
    kept = torch.arange(len(data.targets)) != i
    return replace(data, inputs=data.inputs[kept], targets=data.targets[kept])


def trial(method: dict[str, object], clipping: str = "flat", **train: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 2},
            "privacy": {"noise_multiplier": 1, "clip_norm": CLIP_NORM, "clipping": clipping},
            "train": {"batch_size": BATCH_SIZE, "epochs": 1, "dtype": "float64", **train},
            "optimizer": {"lr": 0.3},
            "method": method,
        }
    )


def tapped(
    config: TrialConfig, data: Dataset, *, sigma: float, rate: float = 1.0
) -> tuple[Step, Tap]:
    """The real step of `config` on `data`, with a tap where the release leaves the boundary."""
    num_examples = len(data.targets)
    budget = Budget(
        num_examples=num_examples,
        run=Run(sampling_rate=rate, noise_multiplier=sigma, steps=100),
        epsilon=math.inf,
        delta=1e-5,
        noise_std=sigma * CLIP_NORM / BATCH_SIZE,
    )
    engine = Noting(network(), nn.functional.cross_entropy, max_physical_batch=5)
    step = Step(config, budget, data, engine, Secret.fixed("contract"))
    tap = Tap()
    vars(step)["method"] = replace(step.method, filters=(tap, *step.method.filters))
    return step, tap


def underway(step: Step, at: int = 3) -> Progress:
    """Before step `at`, the last two iterates far enough apart for gradients to turn."""
    rng = torch.Generator().manual_seed(2)
    now = {k: p.detach().clone() for k, p in network().named_parameters()}
    before = {k: x + torch.randn(x.shape, generator=rng, dtype=x.dtype) for k, x in now.items()}
    progress = step.start(now)
    progress.trail.clear()
    progress.trail.extend([before, now])  # as many of them as the query remembers stay
    progress.step = at
    return progress


def flat(tree: Tensors) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tree.values()])


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def summed(config: TrialConfig, data: Dataset) -> torch.Tensor:
    """B times the release with the noise off, shape (P,)."""
    step, tap = tapped(config, data, sigma=0)
    step(underway(step))
    return BATCH_SIZE * flat(tap.seen[0])


def clipped_each_then_combined(config: TrialConfig, data: Dataset) -> torch.Tensor:
    """The fault: every gradient clipped alone, then the weighted sum; shape (P,)."""
    step, _ = tapped(config, data, sigma=0)
    progress, engine = underway(step), step.engine
    inputs = data.scaled(data.inputs, torch.float64)
    terms = [
        ask.weight
        * flat(
            engine.clipped_sum(
                [ask.point(progress.trail)], [1.0], inputs, data.targets, config.privacy.clip
            )
        )
        for ask in step.method.query
    ]
    return torch.stack(terms).sum(0)


def test_every_method_of_the_table_is_tested_here():
    assert {config["name"] for config in CONFIGS.values()} == set(METHODS)


# 1. The points depend on past releases alone.


@every_method
def test_points_of_a_step_do_not_depend_on_its_batch(method):
    asked = {}
    for seed in (0, 1):  # two data sets that share nothing, met at the third step
        common, _ = tapped(trial(method), examples(), sigma=1)
        progress = common.start({k: p.detach().clone() for k, p in network().named_parameters()})
        common(progress)
        common(progress)
        step, _ = tapped(trial(method), examples(seed=seed), sigma=1)
        step(progress)
        step(progress)
        asked[seed] = step.engine.asked
    third, fourth = zip(asked[0], asked[1], strict=True)
    assert all(same(a, b) for a, b in zip(*third, strict=True))
    # The recording is not blind: one step later the data have had their say.
    assert not any(same(a, b) for a, b in zip(*fourth, strict=True))


@every_method
def test_points_lie_on_the_line_through_the_last_two_iterates(method):
    step, _ = tapped(trial(method), examples(), sigma=1)
    progress = step.start({k: p.detach().clone() for k, p in network().named_parameters()})
    iterates = []
    for _ in range(3):
        iterates.append({k: x.clone() for k, x in progress.params.items()})
        step(progress)
    gamma = method.get("gamma", 0.0)
    before, now = iterates[-2:]
    line = [{k: now[k] + s * (now[k] - before[k]) for k in now} for s in (0.0, gamma)]
    for point in step.engine.asked[-1]:
        assert any(torch.allclose(flat(point), flat(p), rtol=0, atol=1e-14) for p in line)
    if gamma:
        assert torch.allclose(flat(step.engine.asked[-1][-1]), flat(line[1]), rtol=0, atol=1e-14)


# 2. Clipping is the last thing done to one example's answer.


@every_clipping
@every_method
def test_one_example_moves_the_noise_free_sum_by_at_most_the_clip_norm(method, clipping):
    config, data = trial(method, clipping), examples()
    everyone = summed(config, data)
    moved = [
        (everyone - summed(config, without(data, i))).norm().item() for i in range(NUM_EXAMPLES)
    ]
    assert max(moved) <= CLIP_NORM * (1 + 1e-9)
    assert max(moved) > 0.9 * CLIP_NORM  # the bound is reached: a mean's 1/B would hide a fault


@every_clipping
@pytest.mark.parametrize("name", SIGNED)
def test_clipping_each_gradient_before_combining_would_exceed_it(name, clipping):
    config, data = trial(CONFIGS[name], clipping), examples()
    everyone = clipped_each_then_combined(config, data)
    moved = [
        (everyone - clipped_each_then_combined(config, without(data, i))).norm().item()
        for i in range(NUM_EXAMPLES)
    ]
    assert max(moved) > 1.2 * CLIP_NORM


@every_clipping
@every_method
def test_noise_free_release_is_the_sum_of_clipped_answers_over_the_constant_divisor(
    method, clipping
):
    config, data = trial(method, clipping), examples()
    step, tap = tapped(config, data, sigma=0)
    progress = underway(step)
    expected = torch.zeros(sum(x.numel() for x in progress.params.values()), dtype=torch.float64)
    for i in range(NUM_EXAMPLES):
        answer = torch.zeros_like(expected)
        for ask in step.method.query:
            net = network()
            net.load_state_dict(ask.point(progress.trail))
            loss = nn.functional.cross_entropy(
                net(data.scaled(data.inputs[i : i + 1], torch.float64)), data.targets[i : i + 1]
            )
            gradient = torch.autograd.grad(loss, list(net.parameters()))
            answer += ask.weight * torch.cat([g.flatten() for g in gradient])
        norm = answer.norm()
        shrink = min(1, CLIP_NORM / norm) if clipping == "flat" else CLIP_NORM / (norm + 0.01)
        expected += shrink * answer
    step(progress)
    torch.testing.assert_close(flat(tap.seen[0]), expected / BATCH_SIZE, atol=1e-12, rtol=1e-10)


# 3. The noise is isotropic where clipping happened, and nothing shrinks it.


@every_clipping
@every_method
def test_noise_of_the_release_has_the_calibrated_law(method, clipping):
    sigma, config = 1.7, trial(method, clipping)
    quiet, silence = tapped(config, examples(), sigma=0)
    step, tap = tapped(config, examples(), sigma=sigma)
    for t in range(15):
        quiet(underway(quiet, at=t))
        step(underway(step, at=t))
    noise = [
        {k: BATCH_SIZE * (r[k] - s[k]) / CLIP_NORM for k in r}
        for r, s in zip(tap.seen, silence.seen, strict=True)
    ]
    whole = torch.stack([flat(tree) for tree in noise])  # (15, 243): 3645 draws
    # Kolmogorov-Smirnov at level 1e-6: one false alarm in a million. Of 3645 draws it refuses
    # noise two thirds or three halves as strong, as with a wrong rescaling, beyond any doubt.
    law = stats.norm(scale=sigma).cdf
    assert stats.kstest(whole.flatten(), law).pvalue > 1e-6
    assert stats.kstest(whole.flatten() * 2 / 3, law).pvalue < 1e-20
    assert stats.kstest(whole.flatten() * 3 / 2, law).pvalue < 1e-20
    for k in noise[0]:  # every tensor has its share, the smallest bias too
        leaf = torch.stack([tree[k] for tree in noise]).flatten()
        assert stats.kstest(leaf, law).pvalue > 1e-6
    # Isotropic: no direction is quieter. 15 draws along each axis give the axis' variance a
    # relative deviation of sqrt(2/15) = 37 %; the mean over 243 axes one of 2 %.
    axis_variances = whole.square().mean(0) / sigma**2
    assert axis_variances.mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 15 / 243))
    assert axis_variances.min().item() > 0.02  # chi-square of 15 so low: 4e-11 an axis


# 4. The divisor is constant, and an empty batch takes its step.


@every_clipping
@every_method
def test_empty_batch_is_released_as_noise_alone_and_takes_its_step(method, clipping):
    sigma = 1.7
    step, tap = tapped(trial(method, clipping), examples(), sigma=sigma, rate=1e-12)
    progress = underway(step, at=3)
    start = flat(progress.params).clone()
    step(progress)
    rng = Secret.fixed("contract").stream(3, "noise")
    z = torch.cat([torch.from_numpy(rng.standard_normal(x.numel())) for x in tap.seen[0].values()])
    torch.testing.assert_close(flat(tap.seen[0]), sigma * CLIP_NORM * z / BATCH_SIZE)
    assert progress.step == 4
    moved = flat(progress.params) - start
    assert moved.isfinite().all()
    assert (moved != 0).all()


@every_method
def test_divisor_is_the_expected_batch_size_whatever_the_true_one(method):
    one, twice = examples(), examples()
    twice = replace(twice, inputs=twice.inputs.repeat(2, 1, 1, 1), targets=twice.targets.repeat(2))
    config = trial(method)
    torch.testing.assert_close(summed(config, twice), 2 * summed(config, one))


# 5. Nothing else computed from training data leaves the trial.

DIGITS = {"batch_size": 479, "epochs": 2, "device": "cpu"}


@every_method
def test_reports_can_be_recomputed_from_released_weights_and_public_numbers(
    method, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "contract")
    config, room = trial(method, **DIGITS), Room(tmp_path / "trial")
    data = load(DataConfig(name="digits"), 0)
    model = build_model(config.model, config.data.spec, config.seed).double()
    run = Run(sampling_rate=479 / 1437, noise_multiplier=1.0, steps=6)
    rows = []

    def check(row: dict[str, float]) -> None:
        """By the time of a report, the room's checkpoint holds the weights it is about."""
        weights = room.load()["progress"]["trail"][-1]
        score = evaluate(model, weights, data, torch.float64)
        (spent,) = run.epsilons_spent(1437**-1.1, [row["step"]])
        assert row.pop("seconds") >= 0
        assert row == {
            "epoch": len(rows) + 1,
            "step": 3 * (len(rows) + 1),
            "valid/accuracy": score.accuracy,
            "valid/loss": score.loss,
            "privacy/epsilon_spent": pytest.approx(spent, abs=0.02),
            "noise_multiplier": 1.0,
            "learning_rate": 0.3,
        }
        rows.append(row)

    room.make_secret()
    train(config, room, lambda row: check(dict(row)))
    assert len(rows) == 2
    files = {"secret", "checkpoint.pt", "metrics.json", "weights.pt"}
    assert {place.name for place in room.path.iterdir()} == files
    assert capfd.readouterr() == ("", "")  # nothing is said on the side
