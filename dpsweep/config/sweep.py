"""One sweep: a base trial, what varies around it, and how the search is run."""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from dpsweep.config.defaults import DEFAULT, with_default_spaces
from dpsweep.config.explain import shown
from dpsweep.config.letters import spelled_path, spelled_tree
from dpsweep.config.load import Path_, Source, Tree, put, read_yaml, validate, with_overrides
from dpsweep.config.space import (
    BRANCHING,
    KINDS,
    Branch,
    Domain,
    Draw,
    OneOf,
    Space,
    overlap,
    parse_space,
    touched,
)
from dpsweep.config.trial import TrialConfig, load_trial, trial_source
from dpsweep.config.walk import Corner, RandomDraw
from dpsweep.core.errors import ConfigError
from dpsweep.core.strict import Strict

FIXED = {
    "privacy.epsilon": "the promise all trials share",
    "privacy.delta": "the promise all trials share",
    "privacy.noise_multiplier": "calibrated to the promise for each trial",
    "data": "what all trials are compared on",
    "seed": "what makes trials comparable",
}
"""Keys of a trial that a search may not vary, and what they are instead."""

Fits = Callable[[TrialConfig], None]

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"


class ObjectiveConfig(Strict):
    """What a trial is judged by, at its last epoch."""

    metric: Literal["valid/accuracy", "valid/loss"] = "valid/accuracy"
    """Measured on the declared validation data."""

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """Which way is better."""
        return "maximize" if self.metric == "valid/accuracy" else "minimize"


class SamplerConfig(Strict):
    """Who proposes the next trial."""

    name: Literal["tpe", "random", "qmc"] = "tpe"
    """tpe learns from finished trials; random does not; qmc (Sobol) covers the space evenly."""

    startup_trials: int = Field(default=10, gt=0)
    """Random trials before tpe begins to learn."""


class StopConfig(Strict):
    """When a trial that does badly is ended early. It has still spent its privacy."""

    name: Literal["none", "median", "successive_halving"] = "none"
    """median: worse than half of the others at that epoch; successive_halving: not in the best
    1 / reduction of its rung."""

    warmup_epochs: int = Field(default=1, ge=1)
    """Reports a trial may make before it can be ended."""

    reduction: int = Field(default=4, ge=2)
    """Of so many trials, one goes on (successive_halving)."""


class BudgetConfig(Strict):
    """How much is spent on the search."""

    trials: int = Field(gt=0)
    """Trials in all, failed and pruned ones included."""

    hours: float | None = Field(default=None, gt=0)
    """After so many hours no new trial starts; those that run go on to their end."""


class ResourcesConfig(Strict):
    """What one trial takes; how many run at once follows from what the cluster has."""

    cpu: int = Field(default=1, gt=0)
    """Cores, and torch threads."""

    gpu: float = Field(default=0, ge=0)
    """GPUs; a share such as 0.25 puts four trials on one."""


_DOMAINS: list[JsonValue] = [
    {"type": "object", "required": [kind], "properties": {kind: {"type": "array"}}}
    for kind in KINDS
]
"""What a search key may hold, for editors."""


class SweepConfig(Strict):
    """A sweep file."""

    name: str = Field(pattern=_NAME)
    """Letters, digits, dots, dashes and underscores. Everything stored goes by it."""

    base: str | dict[str, Any]
    """The trial config that is varied: a path, relative to this file, or the config itself."""

    search: dict[str, Any] = Field(
        json_schema_extra={
            "properties": {
                "method": {"anyOf": [{"const": DEFAULT}, *_DOMAINS]},
                **{k: {"anyOf": [{"const": DEFAULT}, {"type": "array"}]} for k in BRANCHING},
            },
            "additionalProperties": {"oneOf": _DOMAINS},
        }
    )
    """Dotted key of the trial config -> how it varies. See dpsweep/config/space.py. With
    `method: default`, the method's own space; see dpsweep/config/defaults.py."""

    objective: ObjectiveConfig = ObjectiveConfig()
    """What a trial is judged by."""

    sampler: SamplerConfig = SamplerConfig()
    """Who proposes the next trial."""

    stop: StopConfig = StopConfig()
    """When a trial that does badly is ended early."""

    budget: BudgetConfig
    """How much is spent on the search."""

    resources: ResourcesConfig = ResourcesConfig()
    """What one trial takes."""

    accounting: Literal["composition", "none"] = "composition"
    """What the statement charges for the search: composition, all trials together; none, the
    chosen trial alone, as if the choice had cost nothing (the statement says so)."""

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
    """

    config: SweepConfig
    base: Source
    space: Space
    file: Source
    origins: Mapping[str, str]

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.config.name

    @property
    def promise(self) -> TrialConfig:
        """One corner of the space; data and privacy are the same in all of them."""
        return next(self.corners())

    def trial(self, tree: Tree) -> TrialConfig:
        """The config of one drawn trial, with device and threads from the sweep's resources.

        Raises:
            ConfigError: Naming the search key at fault.
        """
        resources, train = self.config.resources, tree.get("train")
        if isinstance(train, dict):
            device = "cuda" if resources.gpu else "cpu"
            tree = {**tree, "train": {"device": device, "threads": resources.cpu, **train}}
        return load_trial(replace(self.origin, tree=tree))

    @property
    def origin(self) -> Source:
        """Where the values of a drawn trial come from: the base config or the search."""
        return replace(self.base, elsewhere={**self.base.elsewhere, **self.origins})

    def corners(self, fits: Fits | None = None) -> Iterator[TrialConfig]:
        """Every end of every range and every option, one at a time, the rest at their first.

        Args:
            fits: Raises ConfigError for a trial whose pieces do not fit one another.
        """
        seen = Corner()
        yield self._drawn(seen, fits)
        todo = seen.others()
        while todo:
            corner = todo.pop()
            yield self._drawn(corner, fits)
            new = {k: v for k, v in corner.sizes.items() if k not in seen.sizes}
            seen.sizes.update(new)
            todo += [Corner({**corner.picks, k: i}) for k, n in new.items() for i in range(1, n)]

    def samples(self, count: int, fits: Fits | None = None) -> list[TrialConfig]:
        """Random trials of the space, the same ones each time."""
        rng = RandomDraw(random.Random(self.config.seed))
        return [self._drawn(rng, fits) for _ in range(count)]

    def _drawn(self, draw: Draw, fits: Fits | None) -> TrialConfig:
        tree, knobs = self.space.draw(self.base.tree, draw)
        try:
            trial = self.trial(tree)
            if fits:
                fits(trial)
            return trial
        except ConfigError as e:
            raise ConfigError(f"{e}{self._blame(knobs, str(e))}") from e

    def _blame(self, knobs: Mapping[str, Any], message: str) -> str:
        """The searched values behind a mistake that names a line of the base config alone."""
        if "search." in message or not knobs:
            return ""
        places = {key: self.file.line(("search", key)) for key in knobs}
        drawn = [f"{key} = {shown(value)} ({places[key]})" for key, value in knobs.items()]
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
    settings = settings or []
    own = [s for s in settings if s.partition("=")[0].split(".")[0] in _OWN]
    file = with_overrides(read_yaml(path), own, _search_key)
    if "search" not in file.tree:
        raise ConfigError(
            f"{path}: is a trial, not a sweep: it has no search. Train it with: "
            f"dpsweep train {path}"
        )
    config: SweepConfig = validate(SweepConfig, file)
    base = _base(config, file, Path(path).parent)
    return build_sweep(file, trial_source(base, [s for s in settings if s not in own]))


_OWN = set(SweepConfig.model_fields) - {"seed"}  # seed is the trials' own, unless in the file


def _search_key(path: Path_) -> Path_:
    """The keys under search are dotted themselves: search.optimizer.lr is one of them."""
    return (
        path if path[0] != "search" or len(path) == 1 else ("search", ".".join(map(str, path[1:])))
    )


def build_sweep(file: Source, base: Source) -> Sweep:
    """A checked sweep from both sources.

    Raises:
        ConfigError: Naming file, line, key, value and remedy.
    """
    config: SweepConfig = validate(SweepConfig, file)
    file = with_default_spaces(file, base)
    domains, origins = dict[Path_, Domain](), dict[str, str]()
    for path, domain in parse_space(file).domains.items():
        written = ".".join(map(str, path)) or next(k for k in BRANCHING if k in config.search)
        path = spelled_path(path, TrialConfig)
        dotted = ".".join(map(str, path))
        if path in domains:
            raise ConfigError(
                f"{file.at(('search', written))}: varies {dotted} a second time, once under its "
                f"letter in the paper. Delete one of the two"
            )
        domains[path] = _spelled_domain(path, domain)
        origins[dotted] = file.at(("search", written)).removesuffix(written)
        if not path:  # what its mappings touch
            place = f"{file.at(('search', written))}: "
            origins.update(dict.fromkeys(touched(dotted, domains[path]), place))
        if dotted in base.elsewhere:
            raise ConfigError(
                f"{base.at(path)}: is varied by this sweep, so a fixed value would have no effect. "
                f"Vary it otherwise with --set 'search.{written}={{uniform: [LOW, HIGH]}}', or "
                f"delete it at {origins[dotted]}{written}"
            )
        try:
            put(base.tree, path or ("method",), {})
        except ConfigError as e:
            raise ConfigError(f"{origins[dotted]}{written}: {e}") from e
        for key, what in FIXED.items():
            if any(overlap(key, key_) for key_ in touched(dotted, domains[path])):
                raise ConfigError(
                    f"{origins[dotted]}{written}: cannot be searched: {key} is {what}. "
                    f"Set it in the base config, and run one sweep for each value"
                )
    sweep = Sweep(config, base, Space(_overridden(domains, file)), file, origins)
    for trial in sweep.corners():
        if _promised(trial) != _promised(sweep.promise):
            raise ConfigError(
                f"{file.at(('search',))}: varies one of {', '.join(FIXED)}. All trials share them. "
                f"Set it in the base config, and run one sweep for each value"
            )
    _check_choices(sweep)
    return sweep


def _overridden(domains: dict[Path_, Domain], file: Source) -> dict[Path_, Domain]:
    """What stands beside a one_of at the top is searched in all its mappings, instead of theirs."""
    whole = domains.get(())
    if not isinstance(whole, OneOf):
        return domains
    if ("method",) in domains:
        raise ConfigError(
            f"{file.at(('search', 'method'))}: stands beside one_of or each_of, which choose the "
            f"method. Delete one of the two"
        )
    branches = tuple(
        replace(branch, inner={p: d for p, d in branch.inner.items() if p not in domains})
        for branch in whole.branches
    )
    return {**domains, (): replace(whole, branches=branches)}


def _promised(trial: TrialConfig) -> tuple[object, ...]:
    """What all trials of a sweep must have in common."""
    privacy = trial.privacy
    return privacy.epsilon, privacy.delta, privacy.noise_multiplier, trial.data, trial.seed


def _spelled_domain(path: Path_, domain: Domain) -> Domain:
    """The letters inside the mappings of a one_of, replaced by the fields' names."""
    if not isinstance(domain, OneOf):
        return domain

    def spelled(inner: Path_) -> Path_:
        return spelled_path((*path, *inner), TrialConfig)[len(path) :]

    branches = (
        Branch(
            branch.label,
            spelled_tree(branch.fixed, path, TrialConfig),
            {spelled(p): _spelled_domain((*path, *p), d) for p, d in branch.inner.items()},
        )
        for branch in domain.branches
    )
    return OneOf(tuple(branches), domain.in_turn)


def _check_choices(sweep: Sweep) -> None:
    """What the pieces of the sweep file say about one another."""
    config, file = sweep.config, sweep.file
    if config.sampler.name == "qmc" and sweep.space.is_conditional:
        raise ConfigError(
            f"{file.at(('sampler', 'name'))}: qmc covers a space of fixed keys, and this one has a "
            f"one_of. Use sampler: {{name: tpe}} or {{name: random}}"
        )
    if config.accounting == "none" and sweep.promise.data.validation == "holdout":
        raise ConfigError(
            f"{file.at(('accounting',))}: none says that the validation data are public, but "
            f"data.validation: holdout measures with private examples. Write accounting: "
            f"composition, or data.validation: test_split"
        )


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
