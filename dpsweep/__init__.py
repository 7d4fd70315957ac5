"""dpsweep: hyperparameter sweeps for training with differential privacy under a fixed epsilon."""

import os
from pathlib import Path

__version__ = "0.1.0"

# Libraries read these when they are first imported, so they are set before any of them is.
# A tool for private data does not phone home:
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The display is ours, and MLflow would print links into it:
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# Where a Ray token lies ready, clusters expect it; a cluster without tokens takes it as well:
if (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN_PATH" in os.environ:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
