"""Results in MLflow, written by the driver alone."""
