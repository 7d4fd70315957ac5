"""Ray clusters: embedded ones, those that are there, local ones to try, and jobs on others."""
