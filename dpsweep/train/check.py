"""What can be found wrong with one trial before its first step."""

from dpsweep.config.trial import TrialConfig
from dpsweep.data.datasets import check_present
from dpsweep.data.read import download
from dpsweep.train.budget import delta_of


def check_trial(config: TrialConfig, where: str, *, fetch: bool = False) -> list[str]:
    """Checks that the data are there and that delta means something. Returns warnings.

    Args:
        config: A valid trial.
        where: File and line of its data, such as "configs/x.yaml:2".
        fetch: True to download missing data.

    Raises:
        ConfigError: If the data are missing.
    """
    if fetch:
        download(config.data)
    check_present(config.data, where)
    delta, most = delta_of(config), 1 / config.data.num_examples
    if delta < most:
        return []
    return [
        f"privacy.delta: {delta:g} is not below 1 / num_examples = {most:.2g}: a mechanism that "
        f"publishes one random example in full would pass. Use delta: auto "
        f"({config.data.num_examples**-1.1:.2g})"
    ]
