"""Puts a trained model into MLflow's registry: weights and privacy statement, under an alias.

A version is known by the trial it came from, so that to register the same one again changes
nothing but its description and its alias. What is stored MLflow loads without us: a graph, which
runs nobody's code (`serialization_format="pt2"`), or a pipeline of transformers with its tokenizer.
The pipeline of a classifier runs the few lines that are stored beside its weights.
"""

import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.pytorch
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.types import ColSpec, DataType, Schema
from torch import nn

from dpsweep.core.errors import ConfigError, ConnectionRefused, StateError, summarize_error
from dpsweep.tracking.mlflow import ID_TAG, TRIAL_TAG, check_reachable
from dpsweep.tracking.server import redact_password

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_ALIAS = re.compile(r"(?!v\d+$)(?!latest$)[A-Za-z][A-Za-z0-9_-]{0,99}")
_FOLDER = "model"
_KIND_TAG = "dpsweep.flavor"
_SOURCE = {"stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn", "custom"}
"""Keys by which nodes of a graph name the code that they were traced from."""


@dataclass(frozen=True)
class ModelEntry:
    """Model to be registered."""

    name: str  # of the registered model
    alias: str  # which then stands for this version
    sweep_id: str  # of the sweep, as its runs are tagged
    trial: str  # SWEEP/NUMBER, as its run is tagged
    note: str  # the version's description: its privacy statement
    tags: Mapping[str, str]  # to filter by


@dataclass(frozen=True)
class Version:
    """A version in the registry."""

    name: str  # of the registered model
    version: str  # its number
    is_new: bool  # False if the same trial's was there
    # the version that had the alias; None if that is this one, or there was none
    before: str | None


def check_registry_names(name: str, alias: str) -> None:
    """Raise ConfigError if the registry would not take them."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--register {name!r}: a model's name is up to 200 letters, digits and _ . -, such as "
            f"digits-private"
        )
    if not _ALIAS.fullmatch(alias):
        raise ConfigError(
            f"--alias {alias!r}: an alias is up to 100 letters, digits and _ -, begins with a "
            f"letter, and is neither latest nor v1, v2, ...; such as champion"
        )


@dataclass(frozen=True)
class Graph:
    """Model to be stored as a graph."""

    model: nn.Module  # released weights; in evaluation mode, on the CPU
    example: torch.Tensor  # input of it, with more than one image; of zeros, no private example

    def save(self, place: Path, entry: ModelEntry) -> None:
        """Write it to a folder as MLflow stores models of torch."""
        _save_model(self.model, self.example, place)


@dataclass(frozen=True)
class Pipeline:
    """Model to be stored as a pipeline of transformers."""

    folder: Path  # model and tokenizer, as from_pretrained reads them
    task: str  # of transformers, such as text-classification
    inputs: tuple[str, ...]  # names of the texts of one input; none for a single text
    call: Mapping[str, Any]  # arguments of each call of the pyfunc
    prompt: str | None = None  # template of a prompt, with {prompt}

    def save(self, place: Path, entry: ModelEntry) -> None:
        """Write it to a folder as MLflow stores models of transformers."""
        _save_pipeline(self, place, entry)


def register_model(uri: str, entry: ModelEntry, model: Graph | Pipeline) -> Version:
    """Register `model`, unless it is there, and give it the alias.

    Args:
        uri: Of the tracking server, which has the trial's run.
        entry: Name, description and tags.
        model: Stored if it is new.

    Raises:
        ConnectionRefused: If the server does not answer, or refuses.
        StateError: If it has no run of that trial.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    check_reachable(uri)
    try:
        return _register_version(MlflowClient(uri), entry, model)
    except MlflowException as e:
        raise ConnectionRefused(
            f"--register {entry.name}: the tracking server {redact_password(uri)} refuses: "
            f"{summarize_error(e)}"
        ) from e


def _register_version(client: MlflowClient, entry: ModelEntry, model: Graph | Pipeline) -> Version:
    versions = _list_versions(client, entry.name)
    same = {ID_TAG: entry.sweep_id, TRIAL_TAG: entry.trial}
    if isinstance(model, Pipeline):  # the same trial's graph takes other inputs than the note says
        same[_KIND_TAG] = "transformers"
    known = next((v for v in versions if same.items() <= v.tags.items()), None)
    before = next((v.version for v in versions if entry.alias in v.aliases), None)
    made = known or _create_version(client, entry, model)
    client.update_model_version(entry.name, made.version, entry.note)
    for key, value in {**entry.tags, **same}.items():
        client.set_model_version_tag(entry.name, made.version, key, value)
    client.set_registered_model_alias(entry.name, entry.alias, made.version)
    number = str(made.version)
    other = None if before is None or str(before) == number else str(before)
    return Version(entry.name, number, known is None, other)


def _list_versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a model, with their aliases; none if it is not there."""
    found = client.search_model_versions(f"name = '{name}'")
    return [client.get_model_version(name, v.version) for v in found]


def _create_version(
    client: MlflowClient, entry: ModelEntry, model: Graph | Pipeline
) -> ModelVersion:
    run = _get_run(client, entry)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / _FOLDER
        model.save(place, entry)
        client.log_artifacts(run.info.run_id, str(place), _FOLDER)
    if not client.search_registered_models(f"name = '{entry.name}'"):
        client.create_registered_model(entry.name)
    source = f"{run.info.artifact_uri}/{_FOLDER}"
    return client.create_model_version(entry.name, source, run.info.run_id)


def _save_model(model: nn.Module, example: torch.Tensor, place: Path) -> None:
    inputs = example.numpy()
    with torch.no_grad():
        outputs = model(example).numpy()
    signature = infer_signature(inputs, outputs)
    mlflow.pytorch.save_model(
        model,
        str(place),
        input_example=inputs,
        signature=signature,
        serialization_format="pt2",
        pip_requirements=[f"torch=={_get_version('torch')}"],
    )
    if example.dtype == torch.uint8:
        # MLflow needs an input's type to trace the model, and would then take no other: the model
        # takes images as floats too, and itself checks shape and range
        saved = Model.load(str(place))
        saved.signature = ModelSignature(outputs=signature.outputs)
        saved.save(str(place / MLMODEL_FILE_NAME))
    for graph in place.rglob("*.pt2"):
        _strip_source(graph)


def _save_pipeline(model: Pipeline, place: Path, entry: ModelEntry) -> None:
    import mlflow.transformers
    import transformers
    from huggingface_hub import ModelCard

    # a path in its place is refused: MLflow 3.17 takes the class of a task's pipeline for a class,
    # where transformers 5.23 has its name. The code that is trusted is what `folder` was given
    pipeline = transformers.pipeline(
        model.task, str(model.folder), device="cpu", trust_remote_code=True
    )

    text = [ColSpec(DataType.string, name) for name in model.inputs] or [ColSpec(DataType.string)]
    answer = [ColSpec(DataType.string)]
    if model.task == "text-classification":
        answer = [ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")]
    mlflow.transformers.save_model(
        pipeline,
        str(place),
        signature=ModelSignature(Schema(text), Schema(answer)),
        model_card=ModelCard(
            f"---\nlibrary_name: transformers\n---\n# {entry.name}\n\n{entry.note}\n"
        ),
        metadata={**entry.tags, "privacy": entry.note},
        model_config=dict(model.call),
        prompt_template=model.prompt,
        pip_requirements=[f"{name}=={_get_version(name)}" for name in ("torch", "transformers")],
    )
    # MLflow writes where a licence could be looked up, and takes our temporary folder for a name
    (place / "LICENSE.txt").unlink(missing_ok=True)
    saved = Model.load(str(place))
    saved.flavors["transformers"]["source_model_name"] = entry.name
    saved.save(str(place / MLMODEL_FILE_NAME))


def _get_version(package: str) -> str:
    return version(package).partition("+")[0]


def _strip_source(place: Path) -> None:
    """Take out of a stored graph whose code it was traced from: paths, lines, names of classes."""
    program = torch.export.load(place)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for key in node.meta.keys() & _SOURCE:
                    del node.meta[key]
    torch.export.save(program, place)


def _get_run(client: MlflowClient, entry: ModelEntry) -> Run:
    """The trial's own run."""
    wanted = f"tags.`{ID_TAG}` = '{entry.sweep_id}' and tags.`{TRIAL_TAG}` = '{entry.trial}'"
    everywhere = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(everywhere, wanted, max_results=1)
    if not runs:
        raise StateError(
            f"--register {entry.name}: the tracking server has no run of trial {entry.trial}. "
            f"Deliver what waits for it with: dpsweep resume {entry.trial.rpartition('/')[0]}"
        )
    return runs[0]
