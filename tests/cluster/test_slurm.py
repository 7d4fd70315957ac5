"""The Slurm part of the cluster guide, typed literally on real daemons; jobs and nodes are lost."""

import json
import re
from collections.abc import Iterator

import pytest
from slurm_cluster import CHECKOUT, HOME, ROOT, USER, Cluster, missing, slurm, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]

STATE = HOME / "dpsweep-state"
SCRIPT = "docker/slurm/sweep.sbatch"
MINUTES = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The cluster, on which the user has done what the docs say is done once."""
    if reason := missing():
        pytest.skip(f"no Slurm can be run here: {reason}")
    with slurm() as made:
        # Not from the empty account: the environment is this one, which may be without a network.
        once = [line for line in documented(made)[0] if not line.startswith("python3 -m venv")]
        user(made, *once)
        fit = {"cpus-per-task": "2", "mem": "3000", "time": "03:00:00"}
        edits = "; ".join(f"s/^#SBATCH --{k}=.*/#SBATCH --{k}={v}/" for k, v in fit.items())
        user(made, f"sed -i '{edits}; /gpus-per-node/d' {SCRIPT}")
        yield made


def documented(cluster: Cluster) -> list[list[str]]:
    """The commands of cluster-slurm.md, in blocks, with this cluster's names in them."""
    section = (ROOT / "docs/guides/cluster-slurm.md").read_text()
    names = {"/shared/me/dpsweep": str(STATE), "HOST": "ctl", "PASSWORD": cluster.password}
    for word, here in (
        names | {":me:": f":{USER}:", "//me@": f"//{USER}@", "-U me": f"-U {USER}"}
    ).items():
        section = section.replace(word, here)
    blocks = re.findall(r"(?:^    .+\n)+", section, re.MULTILINE)
    return [[line.strip() for line in block.splitlines()] for block in blocks]


def user(cluster: Cluster, *lines: str, code: int = 0) -> str:
    """What the user sees who types these lines."""
    done = cluster["ctl"].as_user("\n".join(lines))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def job(cluster: Cluster, number: str) -> dict[str, str]:
    """What slurmctld knows of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", user(cluster, f"scontrol show job {number}")))


def log(cluster: Cluster, number: str) -> str:
    """What a job has said until now."""
    place = cluster.base / f"export/home/{USER}/dpsweep/dpsweep-{number}.log"
    return place.read_text() if place.exists() else ""


def submitted(said: str) -> str:
    return re.fullmatch(r"Submitted batch job (\d+)\n", said)[1]


def reports(cluster: Cluster, name: str) -> int:
    """How many trials of a sweep have reported."""
    state = cluster.base / f"export/home/{USER}/{STATE.name}"
    return len([*state.glob(f"sweeps/{name}/trials/*/metrics.json")])


def check_nothing_is_left(cluster: Cluster) -> None:
    for name in ("n1", "n2"):
        assert cluster[name].run("ls", "/tmp").stdout == ""
        processes = ("pgrep", "-a", "-u", USER)
        wait_for(
            lambda p=processes, n=name: not cluster[n].run(*p, check=False).stdout, "no process"
        )


def test_a_sweep_goes_through_scancel_and_its_time_limit_to_the_exported_config(cluster):
    _, block = documented(cluster)
    exports = ["source .venv/bin/activate", *(line for line in block if line.startswith("export"))]
    sbatch, *later = [line for line in block if not line.startswith("export")]

    # on an idle machine the sweep would have ended before its time limit
    user(cluster, "sed -i 's/epochs: 30/epochs: 120/' configs/digits_shared.yaml")
    first = submitted(user(cluster, *exports, sbatch))
    wait_for(lambda: reports(cluster, "quickstart"), "a first report", 30 * MINUTES)
    user(cluster, f"scancel {first}")
    second = submitted(user(cluster, *exports, sbatch))  # at once
    wait_for(lambda: "[1/7]" in log(cluster, second), "the first trial's end", 30 * MINUTES)
    hours, minutes, _ = map(int, job(cluster, second)["RunTime"].split(":"))
    limit = 60 * hours + minutes + 3  # the signal comes 2 to 3 minutes before
    cluster["ctl"].run("scontrol", "update", f"JobId={second}", f"TimeLimit={limit}")
    wait_for(lambda: job(cluster, second)["Restarts"] == "1", "the time limit", 10 * MINUTES)
    assert "Stopped. Go on with:" in log(cluster, second)
    cluster["ctl"].run("scontrol", "update", f"JobId={second}", "TimeLimit=180")
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
    wait_for(lambda: job(cluster, second)["JobState"] in ended, "the end", 45 * MINUTES)

    assert job(cluster, second)["JobState"] == "COMPLETED", log(cluster, second)
    assert "driven by" not in log(cluster, first)
    assert re.findall(r"(\d+) trials\b.* finished, [1-4] to continue", log(cluster, second))
    status, export = later
    assert len(re.findall(r" (?:complete|pruned)\b", user(cluster, *exports, status))) == 7
    trials = json.loads(user(cluster, *exports, f"{status} --json"))
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert [trial["trial"] for trial in trials] == [*range(7)]
    assert re.search(r"best/01-trial-\d+\.yaml", user(cluster, *exports, export))
    assert f"best config: {STATE}/best/quickstart.yaml" in log(cluster, second)
    assert "trial" in user(cluster, f"cat {CHECKOUT}/best/*.yaml {STATE}/best/quickstart.yaml")

    runs = user(cluster, f"psql -h ctl -U {USER} -tc 'SELECT count(*) FROM runs' mlflow")
    assert int(runs) == 8, "the trials and the sweep, each once"
    assert not [*(cluster.base / f"export/home/{USER}/{STATE.name}").glob("*.db")]
    check_nothing_is_left(cluster)


def test_a_job_fails_if_no_trial_was_completed_and_outlives_its_nodes(cluster):
    _, block = documented(cluster)
    exports = ["source .venv/bin/activate", *(line for line in block if line.startswith("export"))]
    never = (
        "--set 'search={optimizer.lr: {choice: [2.0e+38, 3.0e+38]}}' --set budget.explore.trials=2"
    )
    run = f"sbatch {SCRIPT} sweeps/quickstart.yaml none {never} --set sampler.name=random"
    none = submitted(user(cluster, *exports, run))
    wait_for(lambda: job(cluster, none)["JobState"] == "FAILED", "the end", 10 * MINUTES)
    assert job(cluster, none)["ExitCode"] == "1:0"
    assert "no trial was completed: 2 failed" in log(cluster, none)

    long = "--set confirm=null --set pruner.name=none --set budget.trials=6"
    long += " --set train.epochs=120 --set train.evaluate_every=2"
    run = f"sbatch {SCRIPT} sweeps/digits_fftkf.yaml lost {long}"
    mine = submitted(user(cluster, *exports, run))
    wait_for(lambda: reports(cluster, "lost") >= 3, "reports from both nodes", 30 * MINUTES)
    cluster["n2"].kill()
    wait_for(lambda: "down*" in cluster.nodes(), "the loss of the second node", 3 * MINUTES)
    wait_for(lambda: " complete: " in log(cluster, mine), "another trial's end", 30 * MINUTES)
    facts = job(cluster, mine)
    assert (facts["JobState"], facts["Restarts"]) == ("RUNNING", "0"), log(cluster, mine)

    cluster["n1"].kill()
    wait_for(lambda: job(cluster, mine)["JobState"] == "PENDING", "the queue again", 3 * MINUTES)
    for name in ("n1", "n2"):
        cluster.add(name)
    wait_for(lambda: job(cluster, mine)["JobState"] == "COMPLETED", "the end", 30 * MINUTES)
    trials = json.loads(user(cluster, *exports, "dpsweep status lost --json"))
    assert [trial["state"] for trial in trials] == ["complete"] * 6
    check_nothing_is_left(cluster)
