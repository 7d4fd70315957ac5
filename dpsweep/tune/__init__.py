"""The search: Ray Tune executes, an Optuna study remembers."""
