"""Checks of one trial before its first step."""

from pathlib import Path

from dpsweep.config.clipping import AdaptiveClipping
from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import Source
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig, refuse_shared_budget
from dpsweep.core.cache import check_once
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.models.own import name_model, user_code_notice

_INSIDE = 32

_FOREIGN = ("own", "torchvision", "timm", "huggingface")
"""Models whose code is not in this package."""

_FEW_SHARES = 8
"""Equal shares that are not warned of: on digits the best number was 3, and 16 cost 6 points."""


def check_trial(config: TrialConfig, source: Source, *, fetch: bool = False) -> list[str]:
    """Check model against method and clipping, data, and delta. Return warnings.

    Args:
        fetch: True to download missing data.

    Raises:
        ConfigError: If the pieces do not fit one another, or the data are missing or not those
            that the config declares.
    """
    refuse_shared_budget(config, source)
    check_parts(config, source)
    check_budget(config, source)
    check_engine(config, source)
    if fetch:
        from dpsweep.data.read import download_dataset

        download_dataset(config.data)
    _check_data(config, source)
    delta, most = config.delta, 1 / config.data.num_examples
    warnings = [said] if (said := user_code_notice(config.model)) else []
    if delta < most:
        return warnings
    return [
        *warnings,
        f"privacy.delta: {delta:g} is not below 1 / num_examples = {most:.2g}: a mechanism that "
        f"publishes one random example in full would pass. Use delta: auto "
        f"({config.data.num_examples**-1.1:.2g})",
    ]


def check_device(config: TrialConfig, source: Source) -> None:
    """Raise ConfigError if a trial that is trained by itself names a GPU that is not here."""
    from dpsweep.training.device import open_device  # torch takes seconds to import

    if config.train.device == "cuda":
        open_device("cuda", key=source.at(("train", "device")))


def _check_data(config: TrialConfig, source: Source) -> None:
    """Read all examples, once a node while the files stay as they are; features come later."""
    images = config.data.without_features

    def check() -> None:
        from dpsweep.data.read import load_dataset, refuse_training_rows  # torch takes seconds

        refuse_training_rows(images, load_dataset(images, config.seed))

    with source.locating():
        config.data.refuse_missing()
        if images.is_kept:
            key = f"data and split {images.model_dump_json()} {config.seed} {images.version}"
            check_once(key, images.read_from, check)
        else:
            check()


def check_sweep(sweep: ResolvedSweep, *, fetch: bool = False) -> list[str]:
    """As `check_trial`, for every corner of a sweep's space and some points inside it."""
    for check in (check_parts, check_budget, check_engine):  # first: what is wrong with all of them
        check(sweep.reference_trial, sweep.origin)
    tried = {sweep.reference_trial.model.model_dump_json()}

    def fits(config: TrialConfig) -> None:
        check_parts(config, sweep.origin)
        if (model := config.model.model_dump_json()) not in tried:  # a second or more for each
            tried.add(model)
            check_engine(config, sweep.origin)
        if sweep.explores:  # what an exploring trial's noise allows, the final run's may not
            check_parts(sweep.final(config), sweep.origin)

    sweep.check_trials(fits, _INSIDE)
    warnings = check_trial(sweep.reference_trial, sweep.origin, fetch=fetch)
    whole = sweep.search_budget
    if whole and whole.charged == "composition" and whole.share is None:
        warnings += _many_equal_shares(sweep, whole.num_runs)
    return warnings


def _many_equal_shares(sweep: ResolvedSweep, num_runs: int) -> list[str]:
    if num_runs <= _FEW_SHARES:
        return []
    return [
        f"{sweep.origin.at(('privacy', 'scope'))}: sweep gives each of {num_runs} runs an equal "
        f"share of epsilon, so that the model that is exported has little. To explore with a small "
        f"share and train one final run with the rest, write budget: {{explore: {{trials: "
        f"{sweep.config.budget.trials}}}}}; dpsweep plan prints what each way leaves"
    ]


def check_parts(config: TrialConfig, source: Source) -> None:
    """Check that model, method, clipping and noise fit one another.

    Raises:
        ConfigError: Naming file, line and key of the misfit.
    """
    try:
        _check_fit(config)
        clipping = config.privacy.clipping
        if isinstance(clipping, AdaptiveClipping):  # its count must not cost more than there is
            clipping.share(plan_privacy(config).run.noise_multiplier, config.train.batch_size)
    except InvalidKey as e:
        raise ConfigError(
            f"{source.at(tuple(e.key.split('.')))}: {str(e).removesuffix('.')}."
        ) from e


def check_budget(config: TrialConfig, source: Source) -> None:
    """Check that the accountant can count the trial's budget.

    Raises:
        ConfigError: Naming file, line and key of what it cannot count.
    """
    with source.locating():
        plan_privacy(config)


def check_engine(config: TrialConfig, source: Source) -> None:
    """Try a model that is not of this package with its engine, as a trial does before its steps.

    Raises:
        ConfigError: Naming file, line and key of what is wrong with it.
    """
    if config.model.name not in _FOREIGN:
        return

    def check() -> None:
        from dpsweep.training.release_check import try_engine

        try:
            try_engine(config)
        except InvalidKey as e:
            place = source.at(tuple(e.key.split(".")))
            raise ConfigError(f"{place}: {str(e).removesuffix('.')}.") from e
        except ConfigError as e:
            key, _, words = str(e).partition(": ")
            if key == "model":  # its code is at fault
                key, _ = name_model(config.model)
            raise ConfigError(source.locate(f"{key}: {words}")) from e

    if config.model.name == "own":  # whose code lies anywhere
        check()
        return
    parts = (config.model, config.data.spec, config.method, config.privacy.clipping, config.train)
    check_once(f"engine {parts!r} {config.data.features is None}", Path(__file__), check)


def _check_fit(config: TrialConfig) -> None:
    """Check that the model can be built and suits method and clipping."""

    def check() -> None:
        from dpsweep.training.assemble import check_fit  # torch takes seconds to import

        check_fit(config)

    if config.model.name in _FOREIGN:
        check()
        return
    parts = (config.model, config.data.spec, config.method, config.privacy.clipping, config.train)
    check_once(f"fit {parts!r} {config.data.features is None}", Path(__file__), check)
