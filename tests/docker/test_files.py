"""The files of docker/ pass the validators of their kinds, and keep this project's own rules."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import DOCKER, ROOT, compose_schema, module, run, tree

import dpsweep

DOCKERFILES = ["Dockerfile", "Dockerfile.cuda"]
SHELL = ["entrypoint.sh", "drive.sh", "tracking.sh", "slurm/sweep.sbatch"]
COMPOSES = ["compose.yaml", "compose.gpu.yaml"]
RAYS = ["kuberay/raycluster.yaml", "kuberay/rayjob.yaml"]
DOCUMENTED = (ROOT / "docs/guides/cluster.md").read_text()
FILES = [path for path in DOCKER.rglob("*") if path.is_file() and path.name != ".env"]


COMPOSE: dict[str, Any] = tree("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]


# Validators.


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name):
    run("hadolint", DOCKER / name)


@pytest.mark.parametrize("name", SHELL)
def test_shellcheck_finds_nothing(name):
    run("shellcheck", DOCKER / name)


@pytest.mark.parametrize("name", COMPOSES)
def test_compose_file_follows_the_specification(name):
    schema, validator = compose_schema(), module("jsonschema")
    validator.validate(tree(name), schema)
    broken = {**tree(name), "servces": {}}
    with pytest.raises(validator.ValidationError, match="servces"):
        validator.validate(broken, schema)


@pytest.mark.parametrize("name", RAYS)
def test_ray_resource_has_the_fields_of_its_kind(name):
    """By a schema of our own; DPSWEEP_KUBERAY_CRDS=FOLDER checks KubeRay's own definitions too."""
    validator = module("jsonschema")
    validator.validate(
        tree(name), json.loads((Path(__file__).parent / "ray_io_v1.json").read_text())
    )
    folder = os.environ.get("DPSWEEP_KUBERAY_CRDS")
    for place in Path(folder).glob("*.yaml") if folder else ():
        definition = yaml.safe_load(place.read_text())["spec"]
        if definition["names"]["kind"] == tree(name)["kind"]:
            (schema,) = [v["schema"] for v in definition["versions"] if v["name"] == "v1"]
            validator.validate(tree(name), schema["openAPIV3Schema"])


@pytest.mark.parametrize("name", RAYS)
def test_kubernetes_takes_the_pods(name):
    validate = module("kubernetes_validate").validate
    for spec in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        validate(pod, "1.30", strict=True)


def test_kubernetes_takes_the_state_folder():
    validate = module("kubernetes_validate").validate
    validate(tree("kuberay/state.yaml"), "1.30", strict=True)


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".yaml", ".yml")], ids=str)
def test_yaml_repeats_no_key(path):
    rules = "{extends: relaxed, rules: {key-duplicates: enable, line-length: disable}}"
    run("yamllint", "-d", rules, path)


# Rules of our own.


def test_a_file_that_never_ran_says_so_in_its_first_line():
    table = re.findall(r"^\| (`docker/.*?) \|.*\| (yes|no)", DOCUMENTED, re.MULTILINE)
    ran = {name: word == "yes" for cell, word in table for name in re.findall(r"`(\S+)`", cell)}
    assert {*SHELL, *DOCKERFILES, *COMPOSES, *RAYS} <= {n.removeprefix("docker/") for n in ran}
    for name, has_run in ran.items():
        first = (ROOT / name).read_text().partition("\n")[0]
        assert first.startswith("# Not run yet") != has_run, name


def pods(name: str) -> Iterator[dict[str, Any]]:
    spec = tree(name)["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield group["template"]["spec"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_is_pinned_built_in_stages_and_not_root(name):
    text = (DOCKER / name).read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in bases)
    final = text.rpartition("FROM ")[2]
    assert re.search(r"^USER 1000$", final, re.MULTILINE)
    assert re.search(r"HEALTHCHECK.*\\\n +CMD \[\"wget\"", final), "no Python every 30 s"
    assert f'org.opencontainers.image.version="{dpsweep.__version__}"' in final
    assert "-perm /6000 -exec chmod a-s" in final, "no setuid programs"
    assert "-c constraints.txt" in text


def test_both_images_differ_in_torch_alone():
    cpu, cuda = (set((DOCKER / name).read_text().splitlines()) for name in DOCKERFILES)
    mine = {line.split()[0] for line in cpu ^ cuda if line and not line.startswith("#")}
    assert mine <= {"ARG", "RUN", "RAY_USAGE_STATS_ENABLED=0", "NVIDIA_VISIBLE_DEVICES=all"} | {
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    }


def test_what_the_images_copy_is_let_into_the_build():
    let_in = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    for name in DOCKERFILES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / name).read_text(), re.M):
            for source in sources.split():
                assert (ROOT / source).exists(), source
                assert any(Path(source).match(pattern) for pattern in let_in), source


def test_images_of_others_are_pinned_to_a_version():
    for name, service in SERVICES.items():
        tag = service["image"].rpartition(":")[2]
        assert "latest" not in tag, name
        assert service["image"].startswith("dpsweep:") or re.search(r"\d+\.\d+", tag), name


def test_every_service_is_watched_and_may_gain_no_privileges():
    for name, service in SERVICES.items():
        watched = "healthcheck" in service or service["image"].startswith("dpsweep:")
        assert watched, name
        if name != "bucket":  # ends at once
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["restart"] == "unless-stopped", name


def test_ports_are_open_to_this_machine_alone():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


SECRET = re.compile(r"(PASSWORD|TOKEN|SECRET|ACCESS_KEY)")


def test_compose_takes_secrets_from_files_that_come_from_the_environment():
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if SECRET.search(key):
                assert key.endswith("_FILE"), (name, key)
                assert value.removeprefix("/run/secrets/") in service["secrets"], (name, key)
        assert not SECRET.search(" ".join(map(str, service.get("command", [])))), name
    example = dict(
        line.split("=", 1)
        for line in (DOCKER / ".env.example").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    for secret in COMPOSE["secrets"].values():
        assert example[secret["environment"]] == ""
    asked = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    assert asked <= set(example)


def test_secrets_file_is_never_committed():
    done = subprocess.run(["git", "check-ignore", "-q", "docker/.env"], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", RAYS)
def test_kubernetes_pods_get_secrets_by_reference_and_no_privileges(name):
    for spec in pods(name):
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            for entry in container["env"]:
                secret = SECRET.search(entry["name"]) or entry["name"] == "DPSWEEP_STORAGE"
                assert not secret or "secretKeyRef" in entry["valueFrom"], entry["name"]


def test_every_deployment_of_ray_asks_for_a_token():
    for name in RAYS:
        spec = tree(name)["spec"]
        assert spec.get("rayClusterSpec", spec)["authOptions"] == {"mode": "token"}
    for name in ("head", "worker"):
        assert SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE=token" in (DOCKER / "slurm/sweep.sbatch").read_text()


def test_no_secret_has_the_name_under_which_kuberay_keeps_a_cluster_s_token():
    # KubeRay 1.5.1 to 1.7.0 (raycluster_controller.go, reconcileAuthSecret) looks for a Secret with
    # the cluster's name. If there is one it makes no token, and the pods wait for ever for the key
    # auth_token in it. A RayJob's cluster is called NAME-xxxxx.
    ours = {
        entry["valueFrom"]["secretKeyRef"]["name"]
        for name in RAYS
        for spec in pods(name)
        for container in spec["containers"]
        for entry in container["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    made = set(re.findall(r"kubectl create secret generic (\S+)", DOCUMENTED))
    assert ours == made, "what the pods ask for is what the reader makes"
    for name in RAYS:
        ray = tree(name)
        called = ray["metadata"]["name"]
        is_job = ray["kind"] == "RayJob"
        assert called not in ours | made
        assert not [one for one in ours | made if is_job and one.startswith(f"{called}-")]


def test_ray_s_version_is_the_one_that_is_tested():
    for name in RAYS:
        spec = tree(name)["spec"]
        assert spec.get("rayClusterSpec", spec)["rayVersion"] == version("ray")


def test_job_waits_for_kueue_and_is_cleared_away():
    job = tree("kuberay/rayjob.yaml")
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    spec = job["spec"]
    assert spec["suspend"]
    assert spec["shutdownAfterJobFinishes"]
    assert spec["ttlSecondsAfterFinished"] > 0
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]


def test_cluster_grows_and_shrinks_by_gpu_workers():
    spec = tree("kuberay/raycluster.yaml")["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"]
    assert group["minReplicas"] == 0 < group["maxReplicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
