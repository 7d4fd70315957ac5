"""Implementation of each verb, in a module named after it or after what several share."""
