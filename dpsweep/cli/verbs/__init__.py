"""Implementation of each verb, in a module named after it or after what several share.

Arguments are the options of `dpsweep/cli/__init__.py`, where each has its help.
"""
