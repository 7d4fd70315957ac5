"""dpsweep: hyperparameter sweeps for training with differential privacy under a fixed epsilon.

    sweep = dpsweep.launch("sweeps/quickstart.yaml")  # or open(NAME), resume(NAME)
    sweep.trials, sweep.best, sweep.figures, sweep.privacy

See dpsweep/api.py. It is loaded when one of its names is first used: `import dpsweep` is instant.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dpsweep.core import __version__

# Libraries read these when they are first imported, so they are set before any of them is.
# A tool for private data does not phone home:
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The display is ours, and MLflow would print links into it:
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# Where a Ray token lies ready, clusters expect it; a cluster without tokens takes it as well:
if (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN_PATH" in os.environ:
    os.environ.setdefault("RAY_AUTH_MODE", "token")

if TYPE_CHECKING:
    from dpsweep.api import OpenSweep, launch, open, resume
    from dpsweep.config.sweep import SweepConfig
    from dpsweep.config.trial import TrialConfig
    from dpsweep.core.errors import DpSweepError

_HOMES = {
    "launch": "api",
    "open": "api",
    "resume": "api",
    "OpenSweep": "api",
    "SweepConfig": "config.sweep",
    "TrialConfig": "config.trial",
    "DpSweepError": "core.errors",
}

__all__ = [
    "DpSweepError",
    "OpenSweep",
    "SweepConfig",
    "TrialConfig",
    "__version__",
    "launch",
    "open",
    "resume",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
