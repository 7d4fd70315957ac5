"""Where a Ray cluster is, and whether it lets anybody in."""

import os
import subprocess
import sys

from ray._private.services import canonicalize_bootstrap_address  # Ray has no public one

_PROBE_SECONDS = 30
REFUSED, TAKEN, AWAY = "refused", "taken", "away"
"""What a cluster says to somebody who has no token."""

_PROBE = f"""
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
    print("{TAKEN}")
except Exception as e:
    print("{REFUSED}" if "auth" in type(e).__name__.lower() else "{AWAY}")
"""
"""Asks a cluster for its nodes, in a process without a token: Ray reads its own only once."""


def running_here() -> str | None:
    """Where `--address auto` leads."""
    try:
        found: str | None = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        return None
    return found


def answer_without_token(address: str) -> str:
    """REFUSED, TAKEN or AWAY: what the cluster at HOST:PORT says to somebody without a token."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    env["RAY_AUTH_MODE"] = "disabled"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env=env,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return AWAY
    return asked.stdout.strip().splitlines()[-1] if asked.stdout.strip() else AWAY
