"""A full disk stops a sweep with a clear word; with trial_dir again it goes on where it was."""

import json
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MB; mounting one takes rights that not every machine gives."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_a_sweep_and_loses_nothing(tmp_path, sweep_file, dpsweep, small_disk):
    state = small_disk / "state"
    driver = subprocess.Popen(
        [
            *(sys.executable, "-m", "dpsweep", "launch", str(sweep_file), "--state", str(state)),
            *("--set=budget.trials=8", "--set=train.epochs=20"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 120
    while len(list(state.glob("sweeps/tiny/trials/*/metrics.json"))) < 3:
        assert time.monotonic() < end, "no third trial began"
        time.sleep(0.1)
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk}/fill"], capture_output=True, check=False
    )
    shown, _ = driver.communicate(timeout=120)
    assert driver.returncode == 2, shown
    assert "the disk is full" in shown
    assert "Traceback" not in shown
    (small_disk / "fill").unlink()
    dpsweep("resume", "tiny", "--state", state)
    told = json.loads(dpsweep("status", "tiny", "--state", state, "--json"))
    assert [trial["state"] for trial in told] == ["complete"] * 8
