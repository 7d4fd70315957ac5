"""A full disk stops a sweep with a clear word; with trial_dir again it goes on where it was."""

import json
import subprocess

import pytest
from servers import python
from waiting import CEILING_SECONDS, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB; mounting one takes rights that not every machine gives."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_a_sweep_and_loses_nothing(
    tmp_path, sweep_file, dpsweep, verb, small_disk
):
    state = small_disk / "state"
    driver = subprocess.Popen(
        python(
            *("dpsweep", "launch", sweep_file, "--state", state),
            *("--set=budget.trials=8", "--set=train.epochs=20"),
        ),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reports = "sweeps/tiny/trials/*/metrics.json"
    wait_for(lambda: len(list(state.glob(reports))) >= 3, "a third trial", driver)
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk}/fill"], capture_output=True, check=False
    )
    shown, _ = driver.communicate(timeout=CEILING_SECONDS)
    assert driver.returncode == 75, shown  # the same command goes on
    assert "the disk is full" in shown
    assert "Traceback" not in shown
    (small_disk / "fill").unlink()
    dpsweep("resume", "tiny", "--state", state)
    told = json.loads(verb("status", "tiny", "--state", state, "--json"))
    assert [trial["state"] for trial in told] == ["complete"] * 8
