"""The verbs for one config: check, train, space, schema; none needs more than torch."""

import json
import sys
from pathlib import Path

from dpsweep.cli.say import console, warn
from dpsweep.config.plan import plan_privacy, statement_of_trial
from dpsweep.config.source import read_yaml
from dpsweep.config.space.defaults import dump_default_space
from dpsweep.config.sweep import SweepConfig, is_sweep, parse_sweep
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import ConfigError, Diverged, StateError, unknown_name_error
from dpsweep.core.strict import Strict
from dpsweep.core.types import Row
from dpsweep.methods import METHODS
from dpsweep.privacy.statement import format_epsilon
from dpsweep.results.rich_table import plain_table


def check(file: Path, settings: list[str], fetch: bool, deep: bool = False) -> None:
    """Validate a file; a sweep is told from a trial by its `search`.

    Args:
        deep: True to run the step and check what it releases; exits with 1 if a check fails.
    """
    source = read_yaml(file)
    if is_sweep(source.tree):
        sweep = parse_sweep(source, file.parent, settings)
        from dpsweep.training.check import check_sweep  # torch, once the file has no mistake

        warn(check_sweep(sweep, fetch=fetch))
        config, shown = (
            sweep.reference_trial,
            f"{len(sweep.corners)} configs at the ends of the search space",
        )
        shown += " are valid trials"
    else:
        base = resolve_trial_source(source, settings)
        config, shown = load_trial(base), "a valid trial"
        from dpsweep.training.check import check_device, check_trial

        check_device(config, base)
        warn(check_trial(config, base, fetch=fetch))
    plan = plan_privacy(config)
    words = statement_of_trial(config, plan.epsilon, plan.run.noise_multiplier)
    console().print(f"{file}: {shown}.\nFirst one: {plan.steps} steps. {words}")
    if deep and not print_release_checks(config):
        sys.exit(1)


def print_release_checks(config: TrialConfig, *, quiet: bool = False) -> bool:
    """Print what a step of `config` was checked for, unless `quiet`; False if a check failed."""
    from dpsweep.training.release_check import check_releases

    checks = check_releases(config)
    columns = ("check", "measured", "at most", "unit", "sec", "")
    table = plain_table("What one step releases, on random inputs", columns, words=columns)
    for c in checks:
        verdict = "holds" if c.holds else "[red]VIOLATED[/red]"
        row = (c.name, f"{c.measured:.4g}", f"{c.allowed:.4g}", c.unit, f"{c.seconds:.1f}", verdict)
        table.add_row(*row)
    if not quiet:
        console().print(table)
        console().print(
            f"Sensitivity is that to one of the {config.data.private_units}, added or removed.",
            highlight=False,
        )
    return all(c.holds for c in checks)


def train(file: Path, settings: list[str], out: Path | None, fetch: bool, quiet: bool) -> None:
    """Train one config in a folder of its own, or go on with an interrupted run there."""
    source = resolve_trial_source(read_yaml(file), settings)
    if is_sweep(source.tree):
        raise ConfigError(f"{file}: is a sweep, not a trial. Run it with: dpsweep launch {file}")
    config = load_trial(source)
    from dpsweep.data.read import fingerprint_images
    from dpsweep.training.check import check_device, check_trial
    from dpsweep.training.loop import train as train_config
    from dpsweep.training.trial_dir import TrialDir

    check_device(config, source)
    warn(check_trial(config, source, fetch=fetch))
    folder = out or _free(Path("runs") / file.stem, config)
    if not _is_open(folder, config):
        if (folder / _STATEMENT).exists() and _holds(folder, config):
            TrialDir(folder).forget()  # the process that ended the run died before it did
        raise StateError(
            f"-o {folder}: holds another run. Name another folder with -o FOLDER, or delete it"
        )
    trial_dir = TrialDir(folder)
    with trial_dir.lock():
        write_atomically(folder / _CONFIG, _identity(config).encode())
        trial_dir.make_secret()
        try:
            result = train_config(
                config,
                trial_dir,
                lambda row: None if quiet else console().print(_line(row)),
                data_mark=fingerprint_images(config.data, config.seed, trial_dir.secret().key),
            )
        except Diverged:
            trial_dir.forget()
            raise
        plan = result.plan
        words = statement_of_trial(config, plan.epsilon, plan.run.noise_multiplier, result.void)
        write_atomically(folder / _STATEMENT, f"{words} {_ALONE}\n".encode())
        trial_dir.forget()
    if not quiet:
        last = result.rows[-1]
        console().print(
            f"{', '.join(f'{k} {v:.4f}' for k, v in _list_metrics(last).items())} in "
            f"{last['seconds']:.1f} s; weights in {trial_dir.weights}\n{words} {_ALONE}"
        )


_CONFIG, _STATEMENT = "config.json", "privacy.txt"
_ALONE = "This covers this run alone: not a search that chose its config, nor other runs."


def space(method: str) -> None:
    """Print a method's default search space."""
    if method not in METHODS:
        raise unknown_name_error("method", method, METHODS, where="space")
    print(f"# {method}: paste this, or name it in a sweep file: search: {{method: default}}")
    print(dump_default_space(method))


def schema(kind: str) -> None:
    """Print the schema of one kind of file."""
    kinds: dict[str, type[Strict]] = {"sweep": SweepConfig, "trial": TrialConfig}
    if kind not in kinds:
        raise unknown_name_error("kind of file", kind, kinds, where="schema")
    print(json.dumps(kinds[kind].model_json_schema(), indent=2))


def _list_metrics(row: Row) -> Row:
    return {k: v for k, v in row.items() if k.startswith("valid/")}


def _line(row: Row) -> str:
    figures = "  ".join(f"{k[len('valid/') :]} {v:.4f}" for k, v in _list_metrics(row).items())
    return (
        f"epoch {row['epoch']:>4g}  step {row['step']:>6g}  {figures}  "
        f"ε spent {format_epsilon(row['privacy/epsilon_spent'])}  "
        f"lr {row['learning_rate']:.3g}  {row['seconds']:.1f} s"
    )


def _is_open(folder: Path, config: TrialConfig) -> bool:
    """True if the folder is new, or holds an unfinished run of this very config."""
    if not folder.exists() or not any(folder.iterdir()):
        return True
    return _holds(folder, config) and not (folder / _STATEMENT).exists()


def _holds(folder: Path, config: TrialConfig) -> bool:
    """True if the folder holds a run of this very config."""
    stored = folder / _CONFIG
    return stored.exists() and stored.read_text() == _identity(config)


def _identity(config: TrialConfig) -> str:
    """Content of config.json, which identifies a run."""
    return config.model_dump_json(indent=1) + "\n"


def _free(folder: Path, config: TrialConfig) -> Path:
    """The first of folder, folder-2, folder-3, ... that is open to this run."""
    place, count = folder, 1
    while not _is_open(place, config):
        count += 1
        place = folder.with_name(f"{folder.name}-{count}")
    return place
