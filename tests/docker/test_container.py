"""The image's commands, as the cluster guide gives them, run as its user where its files lie."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import Container, missing, secret, wait_for
from tools import ROOT, tree

SHORT = ("budget.explore.trials=2", "train.epochs=2")


@pytest.fixture
def head() -> Iterator[Container]:
    """A container as compose's `head`, without its services; nothing runs in it yet."""
    if reason := missing():
        pytest.skip(f"no container can be made here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="dpsweep-image-"))
    made = Container(folder, RAY_AUTH_TOKEN_FILE="/run/token", DPSWEEP_STATE="/state")
    try:
        made.run("sh", "-c", f"umask 077; echo {secret()} > /run/token")
        yield made
    finally:
        made.end()
        shutil.rmtree(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_is_driven_by_the_image_s_user_and_its_best_config_is_in_the_state_folder(head):
    assert head.run("sh", "-c", "touch here").returncode, "WORKDIR is root's: nothing goes there"
    assert head.run(*head.entrypoint, "dpsweep", "--version").stdout == "dpsweep 0.1.0\n"
    assert head.run(*head.health).returncode
    head.start(*head.entrypoint, *tree("compose.yaml")["services"]["head"]["command"])
    wait_for(lambda: head.run(*head.health).returncode == 0, "a healthy head")

    documented = re.search(
        r"compose.yaml exec -d head (sh -c '(.+)')\n",
        (ROOT / "docs/guides/cluster-containers.md").read_text(),
    )
    script = documented[2].replace(" >", "".join(f" --set {s}" for s in SHORT) + " >")
    done = head.run("sh", "-c", script)
    said = head.run("cat", "/state/quickstart.log").stdout
    assert done.returncode == 0, said
    best = "/state/best/quickstart.yaml"
    assert f"best config: {best}" in said
    assert head.run("head", "-1", best).stdout.startswith("# dpsweep export")

    head.run("rm", best)
    assert head.run("sh", "-c", script).returncode == 0
    assert "is finished" in head.run("cat", "/state/quickstart.log").stdout
    assert head.run("test", "-e", best).returncode == 0

    head.run("pkill", "-9", "raylet")
    wait_for(lambda: head.run(*head.health).returncode, "an unhealthy head")
