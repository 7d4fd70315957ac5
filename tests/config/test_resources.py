"""What a trial takes is checked with the file, and told with the key and the remedy."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.config.units import parse_duration, parse_size
from dpsweep.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2e9), ("2 gb", 2e9), ("1.5GiB", 1.5 * 2**30), ("600 MB", 6e8), ("512B", 512)],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5 h", 5400)])
def test_a_time_is_read_with_its_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "2", "GB", "-2GB", "2XB", "0GB", "nan GB", "1e3MB", "2GB 3MB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be a number above 0 with its unit, such as 2GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("resources.gpu=1.5", r"resources\.gpu: 1\.5 is no share of a GPU and no number of GPUs"),
        ("resources.gpu=inf", r"resources\.gpu"),
        ("resources.gpu=nan", r"resources\.gpu"),
        ("resources.gpu=-1", r"resources\.gpu: -1 is below 0\. Give 0, a share, 1 or auto"),
        ("resources.gpu=0.00001", r"resources\.gpu: 1e-05 is less than Ray can assign, 0\.0001"),
        ("resources.gpu=many", r"resources\.gpu: must be a number, got the text 'many'.*auto"),
        ("resources.memory=100MB", r"resources\.memory: 100MB is less than .* at least 500\.0 MB"),
        ("resources.memory=2", r"resources\.memory: must be text, got 2\. .*such as 2GB"),
        ("resources.memory=2XB", r"resources\.memory: must be a number above 0 with its unit"),
        ("resources.max_concurrent=0", r"resources\.max_concurrent: must be greater than 0"),
        (
            "resources.disk=1",
            r"resources\.disk: unknown key\. Known: accelerator, cpu, gpu, max_concurrent, mem",
        ),
        ("budget.trial_timeout=30", r"budget\.trial_timeout: must be text, got 30\. .*30m, 90s"),
        ("budget.trial_timeout=5d", r"budget\.trial_timeout: .* such as 90s, 30m or 2h"),
    ],
)
def test_what_cannot_be_had_is_told_with_its_key(sweep_file, setting, words):
    with pytest.raises(ConfigError, match=words):
        load_sweep(sweep_file, [setting])


@pytest.mark.parametrize(
    ("gpu", "device", "num_gpus", "num_devices"),
    [("0", "cpu", 0, 1), ("0.25", "cuda", 0.25, 1), ("auto", "auto", 0, 1), ("4", "cuda", 4, 4)],
)
def test_gpus_say_where_trials_compute_whose_config_leaves_it_open(
    sweep_file, gpu, device, num_gpus, num_devices
):
    sweep = load_sweep(sweep_file, [f"resources.gpu={gpu}"])
    assert sweep.reference_trial.train.device == device
    assert sweep.config.resources.num_gpus == num_gpus
    assert sweep.config.resources.num_devices == num_devices


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_trials_that_take_no_gpu_may_not_compute_on_one(sweep_file, device):
    words = rf"train\.device: {device}, and trials take no GPU \(.*resources\.gpu is 0\).*Delete"
    with pytest.raises(ConfigError, match=words):
        load_sweep(sweep_file, [f"train.device={device}"])
    with_one = load_sweep(sweep_file, [f"train.device={device}", "resources.gpu=1"])
    assert with_one.reference_trial.train.device == device


@pytest.mark.parametrize("gpu", ["1", "0.25", "auto"])
def test_trials_that_take_a_gpu_may_not_leave_it_idle(sweep_file, gpu):
    words = rf"train\.device: cpu, and each trial takes {gpu}.* GPU \(.*\), which would stand idle"
    with pytest.raises(ConfigError, match=words):
        load_sweep(sweep_file, ["train.device=cpu", f"resources.gpu={gpu}"])


def test_a_trials_time_is_given_in_seconds_to_whoever_measures_it(sweep_file):
    assert load_sweep(sweep_file).config.budget.silence_seconds is None
    with_one = load_sweep(sweep_file, ["budget.trial_timeout=30m"])
    assert with_one.config.budget.silence_seconds == 1800
