"""The files of docker/ pass the validators of their kinds, and keep this project's own rules."""

import json
import os
import re
import shutil
import subprocess
import textwrap
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
RAYS = ["kuberay/raycluster.yaml", "kuberay/job/rayjob.yaml"]
PAGES = sorted((ROOT / "docs/guides").glob("cluster*.md"))
DOCUMENTED = "\n".join(page.read_text() for page in PAGES)
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
    validator = module("jsonschema")
    validator.validate(
        tree(name), json.loads((Path(__file__).parent / "ray_io_v1.json").read_text())
    )


def forbid_unknown(schema: Any) -> Any:
    """A Kubernetes schema that refuses the fields it does not name; the API server drops them."""
    if isinstance(schema, list):
        return [forbid_unknown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: forbid_unknown(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and not is_open:
        strict.setdefault("additionalProperties", False)
    return strict


@pytest.mark.parametrize("name", RAYS)
def test_kuberay_s_own_definition_takes_the_ray_resource(name):
    """Of KubeRay 1.5.1 and 1.7.0; 1.5.0, which would drop authOptions, has to refuse it."""
    folder, validator = os.environ.get("DPSWEEP_KUBERAY_CRDS"), module("jsonschema")
    if not folder:
        pytest.skip("DPSWEEP_KUBERAY_CRDS names no folder with KubeRay's config/crd/bases")
    texts = [place.read_text() for place in Path(folder).glob("*ray*.yaml")]
    definitions = [yaml.load(text, yaml.CSafeLoader)["spec"] for text in texts]  # 1 MB each
    (mine,) = [d for d in definitions if d["names"]["kind"] == tree(name)["kind"]]
    (schema,) = [v["schema"] for v in mine["versions"] if v["name"] == "v1"]
    validator.validate(tree(name), forbid_unknown(schema["openAPIV3Schema"]))


def test_a_definition_without_a_field_refuses_it():
    validator = module("jsonschema")
    spec = {"type": "object", "properties": {"rayVersion": {"type": "string"}}}
    older = {"type": "object", "properties": {"spec": spec}}
    resource = {"spec": {"rayVersion": "2.60.0", "authOptions": {"mode": "token"}}}
    validator.validate(resource, older)
    with pytest.raises(validator.ValidationError, match="authOptions"):
        validator.validate(resource, forbid_unknown(older))


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


def test_each_kind_of_cluster_has_a_page_that_begins_with_what_never_ran():
    kinds = [page for page in PAGES if page.name != "cluster.md"]
    assert len(kinds) == 4
    for page in kinds:
        title, empty, first, *_ = page.read_text().splitlines()
        assert title.startswith("# ")
        assert empty == ""
        assert first.startswith("**What never ran**"), page.name


def test_a_file_that_never_ran_says_so_in_its_first_line():
    table = re.findall(r"^\| (`docker/.*?) \|.*\| (yes|no)", DOCUMENTED, re.MULTILINE)
    ran = {name: word == "yes" for cell, word in table for name in re.findall(r"`(\S+)`", cell)}
    assert {*SHELL, *DOCKERFILES, *COMPOSES, *RAYS} <= {n.removeprefix("docker/") for n in ran}
    for name, has_run in ran.items():
        first = (ROOT / name).read_text().partition("\n")[0]
        assert ("Not run yet" in first) != has_run, name


def pods(name: str) -> Iterator[dict[str, Any]]:
    spec = tree(name)["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield group["template"]["spec"]
    if "submitterPodTemplate" in spec:
        yield spec["submitterPodTemplate"]["spec"]


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
def test_kubernetes_pods_get_secrets_by_reference(name):
    for spec in pods(name):
        for container in spec["containers"]:
            for entry in container.get("env", []):
                secret = SECRET.search(entry["name"]) or entry["name"] == "DPSWEEP_STORAGE"
                assert not secret or "secretKeyRef" in entry["valueFrom"], entry["name"]


@pytest.mark.parametrize("name", RAYS)
def test_every_pod_fits_a_restricted_namespace(name):
    """By Kubernetes' Pod Security Standards, "restricted", with what KubeRay adds to the pods."""
    contexts = [c["securityContext"] for spec in pods(name) for c in spec["containers"]]
    options = tree(name)["spec"].get("autoscalerOptions")  # of a container that the operator adds
    contexts += [options["securityContext"]] if options else []
    for context in contexts:
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged")
    for spec in pods(name):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "persistentVolumeClaim"}


@pytest.mark.parametrize("name", RAYS)
def test_no_trial_runs_on_the_head(name):
    spec = tree(name)["spec"]
    head = spec.get("rayClusterSpec", spec)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


def rendered(folder: Path) -> list[dict[str, Any]]:
    """What kubectl makes of the kustomization of a folder."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_the_documented_kustomization_changes_what_it_says(tmp_path):
    """With image, namespace, storage class and size of the user's own, for cluster and job."""
    (block,) = re.findall(r"(?m)(?:^    .+\n)*^    kind: Kustomization\n(?:^    .+\n)+", DOCUMENTED)
    shutil.copytree(DOCKER / "kuberay", tmp_path / "dpsweep/docker/kuberay")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(textwrap.dedent(block))
    (tmp_path / "mine/sweep.yaml").write_text("name: mine\n")
    made = {one["kind"]: one for one in rendered(tmp_path / "mine")}
    assert set(made) == {"PersistentVolumeClaim", "RayCluster", "RayJob", "ConfigMap"}
    assert {one["metadata"]["namespace"] for one in made.values()} == {"me"}
    claim = made["PersistentVolumeClaim"]["spec"]
    assert claim["storageClassName"] == "nfs"
    assert claim["resources"]["requests"]["storage"] == "200Gi"
    assert made["RayCluster"]["spec"]["workerGroupSpecs"][0]["maxReplicas"] == 16
    images = set(re.findall(r"'image': '(.+?)'", str(made)))
    assert images == {"registry.example/me/dpsweep:1"}
    job = made["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"configMap": {"name": made["ConfigMap"]["metadata"]["name"]}, "name": "sweep"} in job[
        "volumes"
    ]
    for name in RAYS:  # what was not changed stays what the tests above have checked
        (spec,) = [one["spec"] for one in made.values() if one["kind"] == tree(name)["kind"]]
        cluster, mine = (one.get("rayClusterSpec", one) for one in (spec, tree(name)["spec"]))
        for head in (cluster, mine):
            head["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = ""
        assert cluster["headGroupSpec"] == mine["headGroupSpec"]


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
        for entry in container.get("env", [])
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    made = set(re.findall(r"kubectl .*create secret generic (\S+)", DOCUMENTED))
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
    job = tree("kuberay/job/rayjob.yaml")
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    spec = job["spec"]
    assert spec["suspend"]
    assert spec["shutdownAfterJobFinishes"]
    assert 0 < spec["ttlSecondsAfterFinished"] <= 60, "the cluster's GPUs are idle for so long"
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]


def test_cluster_grows_and_shrinks_by_gpu_workers():
    spec = tree("kuberay/raycluster.yaml")["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"]
    assert group["minReplicas"] == 0 < group["maxReplicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
