"""How many trials run at once, and how many of them share a GPU: by numbers, as there is no GPU."""

import pytest

from dpsweep.config.resources import ResourcesConfig
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.execution.gpu_probe import decide_packing, find_costliest_trial, measure_gpu
from dpsweep.execution.resources import (
    NO_GPU,
    GpuProbe,
    choose_next_count,
    choose_packing,
    count_concurrent_trials,
    count_trials_per_node,
    get_memory_share,
    make_bundle,
    make_idle_gpu_warning,
    read_packing,
    store_packing,
    with_packing,
)

GB = 10**9
LAPTOP = {"CPU": 8.0, "memory": 10.0 * GB}
SERVER = {"CPU": 16.0, "GPU": 2.0, "memory": 60.0 * GB}


@pytest.mark.parametrize(
    ("resources", "has", "trials"),
    [
        (ResourcesConfig(), LAPTOP, 8),
        (ResourcesConfig(cpu=3), LAPTOP, 2),
        (ResourcesConfig(memory="3GB"), LAPTOP, 3),
        (ResourcesConfig(gpu=1), LAPTOP, 0),
        (ResourcesConfig(gpu=1), SERVER, 2),
        (ResourcesConfig(gpu=2), SERVER, 1),
        (ResourcesConfig(gpu=4), SERVER, 0),  # all of a trial's GPUs are of one node
        (ResourcesConfig(gpu=0.25), SERVER, 8),
        (ResourcesConfig(gpu=0.3333), SERVER, 6),
        (ResourcesConfig(gpu=0.6), SERVER, 2),  # two halves of different GPUs are no GPU
        (ResourcesConfig(gpu=0.25, cpu=4), SERVER, 4),
        (ResourcesConfig(gpu=0.25, memory="20GB"), SERVER, 3),
    ],
)
def test_what_fits_a_node_is_bounded_by_whatever_is_short(resources, has, trials):
    assert count_trials_per_node(resources, has) == trials


def test_trials_at_once_are_counted_node_by_node_and_bounded_by_the_sweeps_share():
    odd = {"CPU": 3.0}
    assert count_concurrent_trials(ResourcesConfig(cpu=2), [odd, odd, odd]) == 3, "not 9 // 2"
    assert count_concurrent_trials(ResourcesConfig(cpu=1, max_concurrent=4), [odd, odd, odd]) == 4
    assert count_concurrent_trials(ResourcesConfig(cpu=1, max_concurrent=40), [odd]) == 3


@pytest.mark.parametrize(
    ("resources", "nodes", "words"),
    [
        (
            ResourcesConfig(cpu=9),
            [LAPTOP],
            r"takes 9 CPU and 0 GPU, .* 8 CPU, 0 GPU\. Ask for less",
        ),
        (ResourcesConfig(gpu=0.5), [LAPTOP, LAPTOP], r"0\.5 GPU, and no node .*resources\.gpu=0"),
        (ResourcesConfig(memory="20GB"), [LAPTOP], r"20GB of memory, .* 0 GPU, 10\.0 GB\. Ask"),
        (ResourcesConfig(), [], "there is none"),
    ],
)
def test_a_cluster_that_is_too_small_is_told_with_both_numbers(resources, nodes, words):
    with pytest.raises(ConfigError, match=words):
        count_concurrent_trials(resources, nodes)


@pytest.mark.parametrize(
    ("seconds", "memory", "gpu"),
    [
        ({1: 0.10, 2: 0.10, 4: 0.10}, 10, 0.25),  # four times the work
        ({1: 0.10, 2: 0.11, 4: 0.20}, 10, 0.5),  # four do a tenth more than two: not worth it
        ({1: 0.10, 2: 0.20, 4: 0.40}, 10, 1.0),  # the GPU is full already
        ({1: 0.10, 2: 0.10, 4: 0.10}, 40, 0.5),  # four do not fit
        ({1: 0.10, 2: 0.10}, 95, 1.0),  # no headroom for a second one, nor for one
        ({1: 0.10, 2: 0.06, 3: 0.05}, 10, 0.3333),  # three of them are no more than a GPU
    ],
)
def test_a_gpu_is_shared_as_far_as_memory_and_speed_allow(seconds, memory, gpu):
    choice = choose_packing(GpuProbe(memory * GB, 100 * GB, seconds))
    assert choice.gpu == gpu
    assert f"{round(1 / gpu)} trials on a GPU" in choice.words
    assert f"{memory}.0 GB of 100.0 GB" in choice.words
    ResourcesConfig(gpu=choice.gpu)


@pytest.mark.parametrize(
    ("seconds", "memory", "most", "following"),
    [
        ({1: 0.1}, 10, 16, 2),
        ({1: 0.1}, 10, 1, None),  # one CPU for it
        ({1: 0.1}, 60, 16, None),  # no space for two
        ({1: 0.1, 2: 0.1}, 10, 16, 4),
        ({1: 0.1, 2: 0.1}, 30, 16, 3),
        ({1: 0.1, 2: 0.19}, 10, 16, None),  # hardly more work: nor will four do more
        ({1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1}, 10, 16, 9),
        ({1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1, 9: 0.1}, 10, 16, None),
    ],
)
def test_more_processes_are_measured_while_they_fit_and_help(seconds, memory, most, following):
    assert choose_next_count(GpuProbe(memory * GB, 100 * GB, seconds), most) == following


def test_a_share_of_a_gpu_is_a_share_of_its_memory_with_head_room():
    shares = [get_memory_share(ResourcesConfig(gpu=gpu)) for gpu in (0, 0.25, 1)]
    assert shares == [1.0, pytest.approx(0.225), 1.0]
    assert sum([get_memory_share(ResourcesConfig(gpu=0.25))] * 4) < 0.95


def test_auto_without_a_gpu_is_none_and_says_so(sweep_file, tmp_path):
    sweep = load_sweep(sweep_file, ["resources.gpu=auto"])
    assert sweep.reference_trial.train.device == "auto"
    choice = decide_packing(sweep, [LAPTOP, {"CPU": 4.0}])
    assert choice == NO_GPU
    assert "no GPU, or hides it; trials run on CPUs" in choice.words
    assert read_packing(tmp_path) is None
    store_packing(tmp_path, choice)
    assert read_packing(tmp_path) == choice
    done = with_packing(sweep, choice)
    assert (done.config.resources.gpu, done.reference_trial.train.device) == (0.0, "cpu")
    assert (
        with_packing(
            sweep, choose_packing(GpuProbe(10, 100, {1: 1.0}))
        ).reference_trial.train.device
        == "cuda"
    )


def test_auto_without_a_gpu_refuses_a_device_that_the_file_names(sweep_file):
    sweep = load_sweep(sweep_file, ["resources.gpu=auto", "train.device=auto"])
    with pytest.raises(ConfigError, match=r"train\.device: auto, and trials take no GPU"):
        with_packing(sweep, NO_GPU)


def test_gpus_that_lie_idle_are_told_of():
    assert "the 2 GPUs of the cluster are not used" in make_idle_gpu_warning(
        ResourcesConfig(), [LAPTOP, SERVER]
    )
    assert make_idle_gpu_warning(ResourcesConfig(gpu=0.5), [SERVER]) == ""
    assert make_idle_gpu_warning(ResourcesConfig(), [LAPTOP]) == ""


def test_the_costliest_trial_is_that_of_the_most_examples_at_once(sweep_file):
    varied = ["search.train.batch_size={choice: [64, 256, 128]}"]
    assert find_costliest_trial(load_sweep(sweep_file, varied)).train.batch_size == 256
    larger = ["search.model.width={choice: [4, 16]}"]
    assert find_costliest_trial(load_sweep(sweep_file, larger)).model.width == 16
    bound = [*varied, "train.max_physical_batch=32", "search.model.width={choice: [4, 16]}"]
    assert find_costliest_trial(load_sweep(sweep_file, bound)).model.width == 16


@pytest.mark.slow
def test_the_probe_measures_what_processes_side_by_side_take(sweep_file):
    """On the CPU, where two processes for two cores do more than one."""
    sweep = load_sweep(sweep_file)
    found = GpuProbe(
        **measure_gpu(find_costliest_trial(sweep).model_dump(mode="json"), 2, 1, "cpu")
    )
    assert set(found.step_seconds) == {1, 2}
    assert all(0 < seconds < 10 for seconds in found.step_seconds.values())
    assert 50_000_000 < found.memory_bytes < found.total_bytes


MIXED = [
    {"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0},
    {"CPU": 16.0, "GPU": 4.0, "accelerator_type:H100": 1.0},
    {"CPU": 32.0},
]


def test_trials_run_on_cards_of_the_wanted_type_alone():
    assert count_concurrent_trials(ResourcesConfig(gpu=1), MIXED) == 6
    wanted = ResourcesConfig(gpu=1, accelerator="H100")
    assert [count_trials_per_node(wanted, has) for has in MIXED] == [0, 4, 0]
    assert make_bundle(wanted) == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    with pytest.raises(ConfigError, match=r"card of type A100.*there: H100, T4$"):
        count_concurrent_trials(ResourcesConfig(gpu=1, accelerator="A100"), MIXED)


def test_auto_goes_on_without_no_card_that_was_asked_for(sweep_file):
    sweep = load_sweep(sweep_file, ["resources.gpu=auto", "resources.accelerator=A100"])
    with pytest.raises(ConfigError, match=r"card of type A100.*there: H100, T4$"):
        decide_packing(sweep, MIXED)


def test_a_type_of_card_without_a_card_is_refused(sweep_file):
    with pytest.raises(ConfigError, match=r"resources\.accelerator: is T4, and resources.gpu is 0"):
        load_sweep(sweep_file, ["resources.accelerator=T4"])


@pytest.mark.ray
@pytest.mark.slow
def test_ray_places_a_trial_on_the_node_with_that_card():
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group, placement_group_table

    nodes = Cluster()
    for name in ("T4", "H100", "T4"):
        nodes.add_node(num_cpus=1, num_gpus=1, resources={f"accelerator_type:{name}": 1})
    try:
        ray.init(nodes.address)
        nodes.wait_for_nodes()
        bundle = make_bundle(ResourcesConfig(gpu=1, accelerator="H100"))
        placed = placement_group([bundle])
        ray.get(placed.ready())
        (node_id,) = placement_group_table(placed)["bundles_to_node_id"].values()
        (node,) = (n for n in ray.nodes() if n["NodeID"] == node_id)
        assert "accelerator_type:H100" in node["Resources"]
    finally:
        ray.shutdown()
        nodes.shutdown()
