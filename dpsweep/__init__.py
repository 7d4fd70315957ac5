"""dpsweep: hyperparameter sweeps for training with differential privacy under a fixed epsilon."""

import os

__version__ = "0.1.0"

# Read by the libraries when they are first imported. A tool for private data does not phone home.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
