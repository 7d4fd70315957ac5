"""One sweep: a base trial, what varies around it, and how the search is run."""

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dpsweep.config.budget import BudgetConfig, ConfirmConfig
from dpsweep.config.explain import describe_field, shown
from dpsweep.config.resources import ResourcesConfig
from dpsweep.config.scope import check_charged, check_selection, check_shared, with_own_noise
from dpsweep.config.search import (
    ObjectiveConfig,
    PrunerConfig,
    SamplerConfig,
    check_epsilon_varies,
    check_goals,
    check_posterior,
    check_sampler,
)
from dpsweep.config.source import Path_, Source, Tree, read_yaml, validate, with_overrides
from dpsweep.config.space.conditions import Condition, check_names, read_conditions
from dpsweep.config.space.defaults import DEFAULT, with_default_spaces
from dpsweep.config.space.domains import BRANCHING, DOMAIN_SCHEMAS, Choice, Draw, Space
from dpsweep.config.space.points import Corner, RandomDraw, walk
from dpsweep.config.space.run_lengths import extremes, vary
from dpsweep.config.space.searched import EPSILON, FIXED, read_varied
from dpsweep.config.space.start_points import Point, read_start
from dpsweep.config.trial import TrialConfig, load_trial, trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.core.strict import Strict
from dpsweep.privacy.selection import Whole

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

    where: str | list[str] = ""
    """Conditions that every trial meets, over its keys and data.size, such as
    "train.epochs * data.size / train.batch_size <= 20000" (config/space/conditions.py)."""

    start: Literal["published"] | list[dict[str, Any]] = Field(default_factory=list)
    """Points that are tried first, each a mapping of searched keys to values; keys left out are
    drawn. published: what the papers report for each method (config/space/start_points.py)."""

    learn_from: str | None = None
    """An earlier sweep of the same space in the same state folder, whose finished trials the
    sampler knows from the beginning; `launch --from`. What they spent adds to this sweep's."""

    objective: ObjectiveConfig = ObjectiveConfig()
    """What a trial is judged by."""

    sampler: SamplerConfig = SamplerConfig()
    """Who proposes the next trial."""

    choose: Literal["posterior", "observed"] = "posterior"
    """What the best config is chosen by: posterior, the mean of a Gaussian process over all trials,
    which tells merit from luck, where an epsilon has 12 complete trials (else as observed);
    observed, each trial's own result. After two objectives and by private selection: observed."""

    pruner: PrunerConfig = PrunerConfig()
    """When a trial that does badly is ended early."""

    budget: BudgetConfig
    """How much is spent on the search."""

    confirm: ConfirmConfig | None = None
    """Repeats of the best config with fresh noise: an honest figure. Without it the result is that
    of one run, and the report says so."""

    keep_weights: int = Field(default=3, ge=1)
    """Trained weights stay on disk for so many of the best trials, of each epsilon; until the
    config is chosen by posterior, for the better half of all."""

    resources: ResourcesConfig = ResourcesConfig()
    """What one trial takes."""

    accounting: Literal["composition", "private_selection", "none"] = "composition"
    """How the search is charged: composition, all trials together, any search; private_selection,
    a random search of secret length of which only the winner is told; none, the chosen trial
    alone, as if the choice had cost nothing (the statement says so)."""

    seed: int = Field(default=0, ge=0)
    """Public seed of the proposals. Weights start from the base config's seed."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that can run: every corner of its space is a valid trial.

    Attributes:
        config: The sweep file.
        base: Where the base config's values come from.
        space: What varies.
        file: The sweep file.
        origins: Searched key -> where errors say it stands.
        conditions: What a trial of the search has to meet besides.
        start: What is tried first.
    """

    config: SweepConfig
    base: Source
    space: Space
    file: Source
    origins: Mapping[str, str]
    conditions: tuple[Condition, ...] = ()
    start: tuple[Point, ...] = ()

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.config.name

    @property
    def reference_trial(self) -> TrialConfig:
        """One corner of the space; data and delta are the same in all of them.

        So is epsilon, unless `epsilons` has several.
        """
        return next(self.corners())

    @property
    def epsilons(self) -> tuple[float | None, ...]:
        """The budgets that trials have in turn; one of them, or None, if all have the same."""
        budgets = self.space.domains.get(EPSILON)
        if isinstance(budgets, Choice):
            return budgets.options
        return (self.written.privacy.epsilon,)

    @property
    def num_runs(self) -> int:
        """Runs that are charged: trials and their repeats. Under private selection, on average."""
        confirm = self.config.confirm
        if confirm is None:
            return self.config.budget.trials
        groups = len(self.epsilons) * (len(self.methods) if confirm.each_method else 1)
        return self.config.budget.trials + confirm.top * confirm.seeds * groups

    @cached_property
    def methods(self) -> frozenset[str]:
        """The methods that the search chooses from, or the base config's."""
        sections = walk(lambda corner: self.space.draw(self.base.tree, corner)[0].get("method"))
        named = (section for section in sections if isinstance(section, dict))
        return frozenset(str(section.get("name", "compose")) for section in named)

    @property
    def is_private_selection(self) -> bool:
        """True for a private selection, of which only the winner is told, at the end."""
        return self.config.accounting == "private_selection"

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
        return self._written(self.space.draw(self.base.tree, Corner())[0])

    @cached_property
    def schedules(self) -> tuple[tuple[int, float], ...]:
        """Steps and sampling rate of the trials, at the ends of what the search may choose."""
        return extremes(self.space, self.base.tree, self.written.data.num_examples)

    @property
    def schedules_vary(self) -> bool:
        """True if the search may choose batch size or epochs."""
        return vary(self.space)

    @cached_property
    def whole(self) -> Whole | None:
        """The budget that all runs keep together; None where each trial has its own.

        Raises:
            ConfigError: If the sweep file asks for something else besides.
        """
        trial = self.written
        if trial.privacy.scope == "trial" or trial.privacy.epsilon is None:
            return None
        accounting = self.config.accounting
        check_shared(trial.privacy.epsilon, accounting, self.space, self.file, self.origin)
        return Whole(
            charged="private_selection" if self.is_private_selection else "composition",
            epsilon=trial.privacy.epsilon,
            delta=trial.delta,
            num_runs=self.num_runs,
            schedules=self.schedules,
            vary=self.schedules_vary,
        )

    def trial(self, tree: Tree) -> TrialConfig:
        """The config of one drawn trial, with device and threads from the sweep's resources.

        Under `scope: sweep` it has the noise of its share in place of the whole search's epsilon.

        Raises:
            ConfigError: Naming the search key at fault.
        """
        config = self._written(tree)
        return with_own_noise(config, self.whole, self.origin) if self.whole else config

    def _written(self, tree: Tree) -> TrialConfig:
        resources, train = self.config.resources, tree.get("train")
        if isinstance(train, dict):
            own = {"device": resources.device, "threads": resources.cpu}
            tree = {**tree, "train": {**own, **train}}
        return load_trial(replace(self.origin, tree=tree))

    @property
    def origin(self) -> Source:
        """Where the values of a drawn trial come from: the base config or the search."""
        return replace(self.base, elsewhere={**self.base.elsewhere, **self.origins})

    def corners(self, fits: Fits | None = None) -> Iterator[TrialConfig]:
        """Every end of every range and every option, one at a time, the rest at their first.

        They are valid trials, and may still break a condition of `where`.

        Args:
            fits: Raises ConfigError for a trial whose pieces do not fit one another; asked of
                those that meet the conditions.
        """
        yield from walk(lambda corner: self._drawn(corner, fits))

    def admits(self, trial: TrialConfig) -> bool:
        """True if the trial meets every condition of `where`."""
        return all(condition.holds(trial) for condition in self.conditions)

    def samples(self, count: int, fits: Fits | None = None) -> list[TrialConfig]:
        """Random trials that meet the conditions, the same ones each time.

        Fewer than `count` if they are hard to find, but one.
        """
        rng, found = RandomDraw(random.Random(self.config.seed)), list[TrialConfig]()
        for _ in range(max(_DRAWS, 10 * count)):
            if len(found) == count:
                break
            trial = self._drawn(rng, fits)
            found += [trial] if self.admits(trial) else []
        return found

    def share(self) -> float:
        """Share of random points of the space that meet the conditions, from 1000 of them."""
        if not self.conditions:
            return 1.0
        rng = RandomDraw(random.Random(self.config.seed))
        return sum(self.admits(self._drawn(rng, None)) for _ in range(_DRAWS)) / _DRAWS

    def _drawn(self, draw: Draw, fits: Fits | None) -> TrialConfig:
        tree, hyperparams = self.space.draw(self.base.tree, draw)
        try:
            trial = self.trial(tree)
            if fits and self.admits(trial):
                fits(trial)
            return trial
        except ConfigError as e:
            raise ConfigError(f"{e}{self._blame(hyperparams, str(e))}") from e

    def _blame(self, hyperparams: Mapping[str, Any], message: str) -> str:
        """The searched values behind a mistake that names a line of the base config alone."""
        if "search." in message or not hyperparams:
            return ""
        budget = ".".join(EPSILON)  # stands in the base config, and the message says where
        drawn = [
            f"{key} = {shown(value)} ({self.file.line(('search', key))})"
            for key, value in hyperparams.items()
            if key != budget
        ]
        return f" Searched here: {', '.join(drawn)}."


def load_sweep(path: str | Path, settings: list[str] | None = None) -> Sweep:
    """Reads a sweep file and its base, and checks every corner of the space.

    Args:
        path: The sweep file.
        settings: KEY=VALUE of the command line. A key of the sweep file itself (name, budget,
            sampler, ...) is set there, any other in the base config.

    Raises:
        ConfigError: Naming file, line, key, value and remedy.
    """
    return sweep_of(read_yaml(path), Path(path).parent, settings)


def sweep_of(source: Source, folder: Path, settings: list[str] | None = None) -> Sweep:
    """The same from what a file holds, or a program made; `base` is relative to `folder`."""
    settings = settings or []
    keys = set(SweepConfig.model_fields) - {"seed"}  # seed is the trials' own, unless in the file
    own = [s for s in settings if s.partition("=")[0].split(".")[0] in keys]
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
    config: SweepConfig = validate(SweepConfig, file)
    base = _base(config, file, folder)
    return build_sweep(file, trial_source(base, [s for s in settings if s not in own]))


def is_sweep(tree: Tree) -> bool:
    """True for the content of a sweep file, also of one whose `search` was forgotten.

    >>> is_sweep({"name": "x", "base": "y.yaml"}), is_sweep({"data": {}, "model": {}, "name": "x"})
    (True, False)
    """
    of_sweep = SweepConfig.model_fields.keys() - TrialConfig.model_fields.keys()
    of_trial = TrialConfig.model_fields.keys() - SweepConfig.model_fields.keys()
    return "search" in tree or len(of_sweep & tree.keys()) > len(of_trial & tree.keys())


def check_name(name: str, where: str) -> None:
    """Raises ConfigError if a sweep cannot have that name; `where` is the option that gave it."""
    if not re.fullmatch(_NAME, name):
        rule = describe_field(SweepConfig.model_fields["name"])
        raise ConfigError(f"{where} {name!r}: is no name for a sweep. {rule}")


def _search_key(path: Path_) -> Path_:
    """The keys under search are dotted themselves: search.optimizer.lr is one of them."""
    if path[0] != "search" or len(path) == 1:
        return path
    return "search", ".".join(map(str, path[1:]))


def build_sweep(file: Source, base: Source) -> Sweep:
    """A checked sweep from both sources.

    Raises:
        ConfigError: Naming file, line, key, value and remedy.
    """
    config: SweepConfig = validate(SweepConfig, file)
    file = with_default_spaces(file, base)
    varied = read_varied(file, base, config.search)
    conditions = read_conditions(file, config.where)
    sweep = Sweep(config, base, varied.space, file, varied.origins, conditions)
    corners = list(sweep.corners())
    for trial in corners:
        if _promised(trial, sweep) != _promised(corners[0], sweep):
            raise ConfigError(
                f"{file.at(('search',))}: varies one of {', '.join(FIXED)}. All trials share them. "
                f"Set it in the base config, and run one sweep for each value"
            )
    check_names(conditions, corners)
    check_device(sweep)
    if conditions and not sweep.samples(1):
        raise ConfigError(
            f"{conditions[0].place}: none of {_DRAWS} random points of the space (0.0 %) meets "
            f"{' and '.join(c.formula.text for c in conditions)}. Loosen it, or move the ranges"
        )
    _check_choices(sweep)
    return replace(sweep, start=read_start(config.start, sweep))


def _promised(trial: TrialConfig, sweep: Sweep) -> tuple[object, ...]:
    """What all trials of a sweep must have in common."""
    privacy = trial.privacy
    noise = privacy.noise_multiplier if sweep.whole is None else None
    return privacy.delta, noise, trial.data, trial.seed


def check_device(sweep: Sweep) -> None:
    """Refuse trials that compute elsewhere than what they take of the cluster.

    Raises:
        ConfigError: If they compute on a GPU that is not theirs, or take one and leave it idle.
    """
    gpu, place = sweep.config.resources.gpu, sweep.file.at(("resources", "gpu"))
    for trial in sweep.corners():
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


def _check_choices(sweep: Sweep) -> None:
    """What the pieces of the sweep file say about one another."""
    config, file = sweep.config, sweep.file
    check_sampler(config.sampler, sweep.space, file.at(("sampler", "name")))
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


def _base(config: SweepConfig, file: Source, folder: Path) -> Source:
    """The base trial, as written inside the sweep file or in a file of its own."""
    if isinstance(config.base, dict):
        lines = {p[1:]: line for p, line in file.lines.items() if p[:1] == ("base",)}
        return Source(file.name, config.base, lines)
    path = os.path.normpath(folder / config.base)
    try:
        return read_yaml(path)
    except ConfigError as e:
        raise ConfigError(f"{file.at(('base',))}: {config.base!r}: {e}") from e
