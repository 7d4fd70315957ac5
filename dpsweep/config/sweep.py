"""One sweep: a base trial, what varies around it, and how the search is run."""

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dpsweep.config.budget import BudgetConfig, ConfirmConfig
from dpsweep.config.explain import describe_field, format_value
from dpsweep.config.keys import EPSILON, format_path
from dpsweep.config.plan import PrivacyPlan, plan_privacy
from dpsweep.config.resources import ResourcesConfig
from dpsweep.config.scope import (
    check_charged,
    check_explore,
    check_selection,
    check_shared,
    with_own_noise,
)
from dpsweep.config.search import (
    ObjectiveConfig,
    PrunerConfig,
    SamplerConfig,
    check_epsilon_varies,
    check_goals,
    check_metrics,
    check_posterior,
    check_sampler,
)
from dpsweep.config.source import KeyPath, Source, Tree, read_yaml, validate_source, with_overrides
from dpsweep.config.space.conditions import Condition, check_condition_keys, read_conditions
from dpsweep.config.space.defaults import DEFAULT, NARROW, names_a_default, with_default_spaces
from dpsweep.config.space.domains import BRANCHING, DOMAIN_SCHEMAS, Choice, Space
from dpsweep.config.space.run_lengths import find_schedule_extremes, schedules_may_vary
from dpsweep.config.space.searched import EPSILON_PATH, FIXED, read_varied_keys
from dpsweep.config.space.start_points import DEFAULTS, is_complete, read_start
from dpsweep.config.space.suggest import Point, RandomDraw, walk_corners
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.core.strict import Strict
from dpsweep.privacy.search_budget import Charged, SearchBudget

Fits = Callable[[TrialConfig], None]

_DRAWS = 1000
"""Random points that are tried before conditions count as impossible."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"


class SweepConfig(Strict):
    """A sweep file."""

    name: str = Field(pattern=_NAME)
    """1 to 80 letters (a to z), digits, dots, dashes and underscores, beginning with a letter or a
    digit. Everything stored goes by it."""

    base: str | dict[str, Any]
    """The trial config that is varied: a path, relative to this file, or the config itself."""

    search: dict[str, Any] = Field(
        json_schema_extra={
            "properties": {
                "method": {"anyOf": [{"const": DEFAULT}, *DOMAIN_SCHEMAS]},
                **{k: {"anyOf": [{"const": DEFAULT}, {"type": "array"}]} for k in BRANCHING},
            },
            "additionalProperties": {"oneOf": DOMAIN_SCHEMAS},
        }
    )
    """Dotted key of the trial config -> how it varies. See dpsweep/config/space/domains.py. With
    `method: default`, the method's own space; see dpsweep/config/space/defaults.py."""

    space: Literal["narrow", "full"] = "full"
    """Size of a default space. narrow: the total step alone, of each method. full: the
    clip norm and the method's own as well."""

    where: str | list[str] = ""
    """Conditions that every trial meets, over its keys and data.size, such as
    "train.epochs * data.size / train.batch_size <= 20000" (config/space/conditions.py)."""

    start: Literal["published", "defaults"] | list[dict[str, Any]] = Field(default_factory=list)
    """Points that are tried first, each a mapping of searched keys to values; keys left out are
    drawn. published: what the papers report for each method (config/space/start_points.py).
    defaults: the same, with the default total step and clip norm; so begins a default space."""

    learn_from: str | None = None
    """An earlier sweep of the same space in the same state folder, whose finished trials the
    sampler knows from the beginning; `launch --from`. What they spent adds to this sweep's."""

    objective: ObjectiveConfig = ObjectiveConfig()
    """Metric that trials are judged by."""

    sampler: SamplerConfig = SamplerConfig()
    """Proposer of the next trial."""

    choose: Literal["posterior", "observed"] = "posterior"
    """Rule that chooses the best config: posterior, the mean of a Gaussian process over all trials,
    which averages their noise, where an epsilon has 12 complete trials. With fewer, as observed,
    but the first trial of a default space keeps its place unless another is ahead by more than
    a standard error of its accuracy. observed, each trial's own result. After two objectives
    and by private selection: observed."""

    pruner: PrunerConfig = PrunerConfig()
    """When a trial that does badly is ended early. Where time binds (budget.hours is given) and
    trials have one objective, the default is {name: successive_halving, warmup_epochs: 1,
    reduction: 4}; elsewhere none: where the number of trials binds, each may as well end."""

    budget: BudgetConfig
    """Size of the search."""

    confirm: ConfirmConfig | None = None
    """Repeats of the best config with fresh noise: an honest figure. Without it the result is that
    of one run, and the report says so."""

    keep_weights: int = Field(default=3, ge=1)
    """Trained weights stay on disk for so many of the best trials, of each epsilon; until the
    config is chosen by posterior, for the better half of all."""

    resources: ResourcesConfig = ResourcesConfig()
    """Resources of one trial."""

    accounting: Literal["composition", "private_selection", "none"] = "composition"
    """Charge of the search: composition, all trials together, any search; private_selection,
    a random search of secret length of which only the winner is told; none, the chosen trial
    alone, as if the choice had cost nothing (the statement says so)."""

    seed: int = Field(default=0, ge=0)
    """Public seed of the proposals. Weights start from the base config's seed."""

    @model_validator(mode="before")
    @classmethod
    def _bad_trials_end_early_where_time_binds(cls, data: Any) -> Any:
        match data:
            case {"pruner": _} | {"objective": {"metrics": _}}:
                return data
            case {"budget": {"hours": hours}} if hours is not None:
                if data.get("accounting") != "private_selection":  # which takes no pruner
                    return {**data, "pruner": {"name": "successive_halving"}}
        return data


@dataclass(frozen=True)
class _Drawn:
    """A point of the space."""

    tree: Tree  # the trial config as it would stand in a file
    hyperparams: Mapping[str, Any]  # searched values by dotted key


@dataclass(frozen=True)
class ResolvedSweep:
    """A sweep that can run: every corner of its space is a valid trial.

    What follows from the files is computed once, when it is first read; `resolve_sweep` reads all
    that can be wrong. Made by `load_sweep`, `sweep_of` and `resolve_sweep`.
    """

    config: SweepConfig  # the sweep file
    base: Source  # where the base config's values come from
    space: Space  # what varies
    file: Source  # the sweep file
    origins: Mapping[str, str]  # searched key -> where errors say it stands
    conditions: tuple[Condition, ...] = ()  # what a trial of the search has to meet besides

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.config.name

    @property
    def reference_trial(self) -> TrialConfig:
        """One corner of the space; data and delta are the same in all of them.

        So is epsilon, unless `epsilons` has several.
        """
        return self.corners[0]

    @property
    def epsilons(self) -> tuple[float | None, ...]:
        """The budgets that trials have in turn; one of them, or None, if all have the same."""
        budgets = self.space.domains.get(EPSILON_PATH)
        if isinstance(budgets, Choice):
            return budgets.options
        return (self.written.privacy.epsilon,)

    @property
    def num_runs(self) -> int:
        """Runs that are charged: trials and their repeats, or the final run that they choose.

        Under private selection, on average.
        """
        confirm, budget = self.config.confirm, self.config.budget
        if confirm is None:
            return budget.trials + self.explores
        groups = len(self.epsilons) * (len(self.methods) if confirm.each_method else 1)
        return self.config.budget.trials + confirm.top * confirm.seeds * groups

    @cached_property
    def methods(self) -> frozenset[str]:
        """The methods that the search chooses from, or the base config's."""
        sections = (drawn.tree.get("method") for drawn in self._drawn_corners)
        named = (section for section in sections if isinstance(section, dict))
        return frozenset(str(section.get("name", "compose")) for section in named)

    @property
    def explores(self) -> bool:
        """True if noisy trials choose a config for one final run."""
        return self.config.budget.explore is not None

    @property
    def is_private_selection(self) -> bool:
        """True for a private selection, of which only the winner is told, at the end."""
        return self.config.accounting == "private_selection"

    @property
    def charged(self) -> Charged:
        """Way the search is charged; that it is not is said in words, beside the figure."""
        return "private_selection" if self.is_private_selection else "composition"

    @property
    def chooses_by_posterior(self) -> bool:
        """True if the best config is chosen by a Gaussian process, once there are enough trials.

        A private selection's proof is about the best score of single runs; of two objectives
        there is a front.
        """
        one_goal = len(self.config.objective.goals) == 1
        return self.config.choose == "posterior" and one_goal and not self.is_private_selection

    @property
    def num_kept(self) -> int:
        """Trials whose weights stay; those that are to be confirmed are among them."""
        confirm = self.config.confirm
        return max(self.config.keep_weights, confirm.top if confirm else 0)

    @cached_property
    def written(self) -> TrialConfig:
        """One corner of the space with its privacy as the file has it, scope included."""
        return self._read_written(self._drawn_corners[0].tree)

    @cached_property
    def schedules(self) -> tuple[tuple[int, float], ...]:
        """Counted steps and sampling rate of trials, at the ends of what the search may choose."""
        trees = (drawn.tree for drawn in self._drawn_corners)
        return find_schedule_extremes(
            self.space, self.base.tree, trees, self.written.data.num_examples, self._read_written
        )

    @property
    def schedules_vary(self) -> bool:
        """True if the search may choose batch size, epochs or a noise that is counted otherwise."""
        return schedules_may_vary(self.space) or len(self.schedules) > 1

    @cached_property
    def search_budget(self) -> SearchBudget | None:
        """The budget that all runs keep together; None where each trial has its own.

        Raises:
            ConfigError: If the sweep file asks for something else besides.
        """
        trial = self.written
        if trial.privacy.scope == "trial" or trial.privacy.epsilon is None:
            return None
        accounting, explore = self.config.accounting, self.config.budget.explore
        check_shared(trial.privacy.epsilon, accounting, self.space, self.file, self.origin)
        return SearchBudget(
            charged=self.charged,
            epsilon=trial.privacy.epsilon,
            delta=trial.delta,
            num_runs=self.num_runs,
            schedules=self.schedules,
            vary=self.schedules_vary,
            share=explore.share if explore else None,
        )

    def trial(self, tree: Tree) -> TrialConfig:
        """The config of one drawn trial, with device and threads from the sweep's resources.

        Under `scope: sweep` it has the noise of its share in place of the whole search's epsilon.

        Raises:
            ConfigError: Naming the search key at fault.
        """
        config = self._read_written(tree)
        if self.search_budget is None:
            return config
        config = with_own_noise(config, self.search_budget, self.origin)
        given = tree.get("optimizer", {})
        if STEP_KEYS & given.keys():
            return config
        return config.with_total_step(self.with_searched_noise(config).default_total_step)

    def with_searched_noise(self, trial: TrialConfig) -> TrialConfig:
        """A trial with the noise that ranges and defaults are for; if it explores, the final's."""
        if self.search_budget is not None and self.explores:
            return with_own_noise(trial, self.search_budget, self.origin, final=True)
        return trial

    def exploring(self, trial: TrialConfig) -> TrialConfig:
        """A trial as it is run: where it explores, its step is fitted to its noise.

        What is searched is the final run's config. An exploring trial has the same but for more
        noise, and for a step that is smaller in that ratio (optim/base.py).
        """
        if not self.explores:
            return trial
        return self._fit_batch(trial, 1 / self._noise_ratio(trial))

    def final(self, explored: TrialConfig) -> TrialConfig:
        """The final run at the config of an exploring trial: less noise, and a larger step."""
        assert self.search_budget is not None, "check_explore asks for it"
        config = with_own_noise(explored, self.search_budget, self.origin, final=True)
        return self._fit_batch(config, self._noise_ratio(explored))

    def _noise_ratio(self, trial: TrialConfig) -> float:
        """Noise of the final run over that of the exploring ones, below 1."""
        assert self.search_budget is not None, "check_explore asks for it"
        noise = self.search_budget.noise
        return noise(trial.steps_and_rate, final=True) / noise(trial.steps_and_rate)

    def _fit_batch(self, trial: TrialConfig, ratio: float) -> TrialConfig:
        return trial.model_copy(update={"optimizer": trial.optimizer.fit_to_noise(ratio)})

    def _read_written(self, tree: Tree) -> TrialConfig:
        resources, train = self.config.resources, tree.get("train")
        if isinstance(train, dict):
            own = {"device": resources.device, "threads": resources.cpu}
            tree = {**tree, "train": {**own, **train}}
        return load_trial(replace(self.origin, tree=tree))

    @cached_property
    def origin(self) -> Source:
        """Source of a drawn trial's values: the base config or the search."""
        return replace(self.base, elsewhere={**self.base.elsewhere, **self.origins})

    @cached_property
    def corners(self) -> tuple[TrialConfig, ...]:
        """Every end of every range and every option, one at a time, the rest at their first.

        They are valid trials, and may still break a condition of `where`.
        """
        return tuple(self._trial_of(drawn) for drawn in self._drawn_corners)

    @cached_property
    def plans(self) -> tuple[PrivacyPlan, ...]:
        """Epsilon, delta, noise multiplier and steps of each corner; computed by the accountant."""
        return tuple(map(plan_privacy, self.corners))

    @cached_property
    def start(self) -> tuple[Point, ...]:
        """Points that are tried first."""
        return read_start(self._written_start, self)

    @property
    def _written_start(self) -> Literal["published", "defaults"] | list[dict[str, Any]]:
        start: Literal["published", "defaults"] | list[dict[str, Any]]
        start = self.file.tree.get("start", [])  # `defaults` where a default space wrote it
        return start

    @cached_property
    def starts_at_default(self) -> bool:
        """True if the first trial is the default of the one method and epsilon that is searched.

        It is not where a searched key leaves out the default's value, or has none.
        """
        if self._written_start != DEFAULTS or len(self.start) != 1:
            return False
        return is_complete(self.start[0], self)

    @cached_property
    def _drawn_corners(self) -> tuple[_Drawn, ...]:
        return tuple(walk_corners(lambda corner: _Drawn(*self.space.draw(self.base.tree, corner))))

    def admits(self, trial: TrialConfig) -> bool:
        """True if the trial meets every condition of `where`."""
        return all(condition.holds(trial) for condition in self.conditions)

    def check_trials(self, fits: Fits, num_samples: int = 0) -> None:
        """Check that the pieces of each corner, and of some points inside, fit one another.

        Args:
            fits: Raises ConfigError if they do not; called for trials that meet the conditions.
            num_samples: How many points inside.
        """
        for drawn, trial in zip(self._drawn_corners, self.corners, strict=True):
            self._check(drawn, trial, fits)
        for drawn, trial in self._samples(num_samples):
            self._check(drawn, trial, fits)

    def samples(self, count: int) -> list[TrialConfig]:
        """Random trials that meet the conditions, the same ones each time.

        Fewer than `count` if they are hard to find, but one.
        """
        return [trial for _, trial in self._samples(count)]

    def share(self) -> float:
        """Share of random points of the space that meet the conditions, from 1000 of them."""
        if not self.conditions:
            return 1.0
        rng = RandomDraw(random.Random(self.config.seed))
        return sum(self.admits(self._random(rng)[1]) for _ in range(_DRAWS)) / _DRAWS

    def _samples(self, count: int) -> Iterator[tuple[_Drawn, TrialConfig]]:
        rng = RandomDraw(random.Random(self.config.seed))
        draws = (self._random(rng) for _ in range(max(_DRAWS, 10 * count)))
        return islice(((drawn, trial) for drawn, trial in draws if self.admits(trial)), count)

    def _random(self, rng: RandomDraw) -> tuple[_Drawn, TrialConfig]:
        drawn = _Drawn(*self.space.draw(self.base.tree, rng))
        return drawn, self._trial_of(drawn)

    def _trial_of(self, drawn: _Drawn) -> TrialConfig:
        with self._blaming(drawn):
            return self.trial(drawn.tree)

    def _check(self, drawn: _Drawn, trial: TrialConfig, fits: Fits) -> None:
        with self._blaming(drawn):
            if self.admits(trial):
                fits(trial)

    def _base_fails(self, words: str) -> bool:
        """True if the base config makes the same mistake by itself, whatever is searched."""
        try:
            load_trial(self.base)
        except ConfigError as e:
            return str(e) == words
        return False

    @contextmanager
    def _blaming(self, drawn: _Drawn) -> Iterator[None]:
        """Name the searched values behind a mistake that names a line of the base config alone."""
        try:
            yield
        except ConfigError as e:
            # Several budgets stand in the base config, and the message says where.
            values = [
                f"{key} = {format_value(value)} ({self.file.line(('search', key))})"
                for key, value in drawn.hyperparams.items()
                if key != EPSILON
            ]
            if "search." in str(e) or not drawn.hyperparams or self._base_fails(str(e)):
                raise
            raise ConfigError(f"{e} Searched here: {', '.join(values)}.") from e


def load_sweep(
    path: str | Path, settings: list[str] | None = None, rename: Callable[[str], str] | None = None
) -> ResolvedSweep:
    """Read a sweep file and its base, and check every corner of the space.

    Args:
        settings: KEY=VALUE of the command line. A key of the sweep file itself (name, budget,
            sampler, ...) is set there, any other in the base config.
        rename: Gives the sweep another name than that of the file and the settings.

    Raises:
        ConfigError: Naming file, line, key, value and remedy.
    """
    return parse_sweep(read_yaml(path), Path(path).parent, settings, rename)


def parse_sweep(
    source: Source,
    folder: Path,
    settings: list[str] | None = None,
    rename: Callable[[str], str] | None = None,
) -> ResolvedSweep:
    """The same from what a file holds, or a program made; `base` is relative to `folder`."""
    own, others = _split_settings(settings or [])
    file = with_overrides(source, own, _search_key)
    if not is_sweep(file.tree):
        raise ConfigError(
            f"{file.name}: is a trial, not a sweep: it has no search. Train it with: "
            f"dpsweep train {file.name}"
        )
    if "search" not in file.tree:
        raise ConfigError(
            f"{file.at(())}: search: is missing, and a sweep needs it. Name what varies, such as "
            f"search: {{optimizer.lr: {{log_uniform: [0.1, 10]}}}}, or the method's own ranges "
            f"with search: {{method: default}}"
        )
    config: SweepConfig = validate_source(SweepConfig, file)
    if rename:
        file = replace(file, tree={**file.tree, "name": rename(config.name)})
        config = validate_source(SweepConfig, file)
    if config.space == NARROW and not names_a_default(config.search):
        raise ConfigError(
            f"{file.at(('space',))}: narrow is a size of default spaces, and the search names "
            f"none. Write search: {{method: default}}, or delete it"
        )
    base = _load_base(config, file, folder)
    return _resolve(config, file, resolve_trial_source(base, others))


def change_sweep(sweep: ResolvedSweep, settings: list[str]) -> ResolvedSweep:
    """Return a sweep with KEY=VALUE of the command line set, as in `load_sweep`.

    Raises:
        ConfigError: If it is then no valid sweep, or has another name.
    """
    own, others = _split_settings(settings)
    file = with_overrides(sweep.file, own, _search_key)
    if file.tree["name"] != sweep.name:
        raise ConfigError(
            f"--set name: a launched sweep keeps its name, {sweep.name}. Launch its file under "
            f"another one: dpsweep launch FILE --name {file.tree['name']} --from {sweep.name}"
        )
    return resolve_sweep(file, resolve_trial_source(sweep.base, others))


def _split_settings(settings: list[str]) -> tuple[list[str], list[str]]:
    """Split settings into those of the sweep file itself and those of its base."""
    keys = set(SweepConfig.model_fields) - {"seed"}  # seed is the trials' own, unless in the file
    own = [s for s in settings if s.partition("=")[0].split(".")[0] in keys]
    return own, [s for s in settings if s not in own]


def is_sweep(tree: Tree) -> bool:
    """True for the content of a sweep file, also of one whose `search` was forgotten.

    >>> is_sweep({"name": "x", "base": "y.yaml"}), is_sweep({"data": {}, "model": {}, "name": "x"})
    (True, False)
    """
    of_sweep = SweepConfig.model_fields.keys() - TrialConfig.model_fields.keys()
    of_trial = TrialConfig.model_fields.keys() - SweepConfig.model_fields.keys()
    return "search" in tree or len(of_sweep & tree.keys()) > len(of_trial & tree.keys())


def check_name(name: str, where: str) -> None:
    """Raise ConfigError if a sweep cannot have that name; `where` is the option that gave it."""
    if not re.fullmatch(_NAME, name):
        rule = describe_field(SweepConfig.model_fields["name"])
        raise ConfigError(f"{where} {name!r}: is no name for a sweep. {rule}")


def _search_key(path: KeyPath) -> KeyPath:
    """The keys under search are dotted themselves: search.optimizer.lr is one of them."""
    if path[0] != "search" or len(path) == 1:
        return path
    return "search", format_path(path[1:])


def resolve_sweep(file: Source, base: Source) -> ResolvedSweep:
    """Resolve a sweep from both sources, and check it.

    Raises:
        ConfigError: Naming file, line, key, value and remedy.
    """
    return _resolve(validate_source(SweepConfig, file), file, base)


def _resolve(config: SweepConfig, file: Source, base: Source) -> ResolvedSweep:
    file = with_default_spaces(file, base)
    varied = read_varied_keys(file, base, config.search)
    conditions = read_conditions(file, config.where)
    sweep = ResolvedSweep(config, base, varied.space, file, varied.origins, conditions)
    if sweep.explores:
        check_explore(config, sweep.written, file, sweep.origin)
    targets = [_get_privacy_target(trial, sweep) for trial in sweep.corners]
    if any(each != targets[0] for each in targets):
        raise ConfigError(
            f"{file.at(('search',))}: varies one of {', '.join(FIXED)}. All trials share them. "
            f"Set it in the base config, and run one sweep for each value"
        )
    check_condition_keys(conditions, sweep.corners)
    check_device(sweep)
    if conditions and not sweep.samples(1):
        raise ConfigError(
            f"{conditions[0].place}: none of {_DRAWS} random points of the space (0.0 %) meets "
            f"{' and '.join(c.formula.text for c in conditions)}. Loosen it, or move the ranges"
        )
    _check_choices(sweep)
    assert sweep.start is not None  # read here: a point outside the space is told before a launch
    return sweep


STEP_KEYS = {"lr", "total_step"}
"""Keys of `optimizer` that give the size of a step."""


def _get_privacy_target(trial: TrialConfig, sweep: ResolvedSweep) -> tuple[object, ...]:
    """Settings that all trials of a sweep must share."""
    privacy = trial.privacy
    noise = privacy.noise_multiplier if sweep.search_budget is None else None
    return privacy.delta, noise, trial.data, trial.seed


def check_device(sweep: ResolvedSweep) -> None:
    """Refuse trials that compute elsewhere than what they take of the cluster.

    Raises:
        ConfigError: If they compute on a GPU that is not theirs, or take one and leave it idle.
    """
    gpu, place = sweep.config.resources.gpu, sweep.file.at(("resources", "gpu"))
    for trial in sweep.corners:
        device, key = trial.train.device, sweep.origin.at(("train", "device"))
        if gpu == 0 and device != "cpu":
            # Ray does not hide a node's GPUs from a worker that takes none
            raise ConfigError(
                f"{key}: {device}, and trials take no GPU ({place} is 0): all that run at once "
                f"would compute on the first GPU of their node and share its memory. Delete "
                f"train.device and set resources.gpu: 1, a share such as 0.25, or auto"
            )
        if gpu != 0 and device == "cpu":
            raise ConfigError(
                f"{key}: cpu, and each trial takes {gpu} GPU ({place}), which would stand idle. "
                f"Delete train.device to compute there, or set resources.gpu: 0"
            )


def _check_choices(sweep: ResolvedSweep) -> None:
    """Check the sections of a sweep file against one another."""
    config, file = sweep.config, sweep.file
    check_sampler(config.sampler, sweep.space, file.at(("sampler", "name")))
    check_metrics(config.objective, sweep.written.data.task.metric_names, file)
    check_goals(config.objective, config.sampler, config.pruner, file)
    check_epsilon_varies(config.objective, sweep.epsilons, file)
    if "choose" in config.model_fields_set and config.choose == "posterior":
        check_posterior(sweep.chooses_by_posterior, sweep.is_private_selection, file)
    if config.confirm and config.confirm.each_method and len(sweep.methods) == 1:
        raise ConfigError(
            f"{file.at(('confirm', 'each_method'))}: the search has one method, "
            f"{next(iter(sweep.methods))}. Delete it, or search over several with each_of"
        )
    check_charged(sweep.written.data.validation, config.accounting, file)
    if sweep.is_private_selection:
        check_selection(config, sweep.space, file, sweep.origin)


def _load_base(config: SweepConfig, file: Source, folder: Path) -> Source:
    """The base trial, as written inside the sweep file or in a file of its own."""
    if isinstance(config.base, dict):
        lines = {p[1:]: line for p, line in file.lines.items() if p[:1] == ("base",)}
        return Source(file.name, config.base, lines)
    path = os.path.normpath(folder / config.base)
    try:
        return read_yaml(path)
    except ConfigError as e:
        raise ConfigError(f"{file.at(('base',))}: {config.base!r}: {e}") from e
