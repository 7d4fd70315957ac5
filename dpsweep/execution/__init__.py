"""Run trials on Ray: the driver, its workers, and what to do when one fails."""
