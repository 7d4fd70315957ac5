"""Start, resume and finish a sweep: one orchestrator for the command line and the Python API."""
