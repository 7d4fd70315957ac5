"""The confirmed best of a sweep as a registered model, with its privacy statement."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dpsweep.config.keys import EPSILON
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, StateError, format_shape
from dpsweep.core.inputs import Inputs, apply_model
from dpsweep.data import DataConfig
from dpsweep.data.read import Dataset, list_class_names
from dpsweep.data.tasks import Classification, Regression
from dpsweep.data.text import GenerationData, TextData
from dpsweep.models.huggingface import HuggingFace
from dpsweep.privacy.statement import NO_EPSILON, format_delta, format_epsilon
from dpsweep.results.best_trials import list_best_by_budget, make_no_result_error
from dpsweep.results.export import Origin, origin_of
from dpsweep.results.formats import Winner, kept_weights
from dpsweep.results.formats.huggingface import load_trained, write_pipeline
from dpsweep.search.charge import describe_trial_privacy, get_charged_run
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.study import Study
from dpsweep.tracking.registry import (
    Graph,
    ModelEntry,
    Pipeline,
    Version,
    check_registry_names,
    register_model,
)
from dpsweep.training.device import use_torch_defaults

_LONGEST_TAG = 5000
"""Characters that every registry takes."""


@dataclass(frozen=True)
class Registered:
    """A version in the registry."""

    name: str  # of the registered model
    version: str  # its number
    trial: int  # the trial whose weights it has
    uri: str  # models:/NAME@ALIAS, by which MLflow loads it
    words: str  # what is told of it


def register_best(
    study: Study,
    folder: SweepFolder,
    state: StateFolder,
    name: str,
    *,
    alias: str = "champion",
    allow_void: bool = False,
) -> list[Registered]:
    """Register the best model of each budget where the sweep is tracked.

    Raises:
        ConfigError: If name or alias are not such as the registry takes.
        StateError: If the sweep is not finished or void, or its weights or its run are not there.
        ConnectionRefused: If the tracking server does not answer.
    """
    check_registry_names(name, alias)
    sweep = study.sweep.name
    if not study.is_finished():
        raise StateError(
            f"--register {name}: sweep {sweep!r} is not finished, and its best may be another "
            f"yet. Go on with: dpsweep resume {sweep}"
        )
    best = list_best_by_budget(study)
    if not best:
        raise make_no_result_error(study)
    void = study.is_void or any(record.void for record in study.records())
    if void and not allow_void:
        raise StateError(
            f"--register {name}: sweep {sweep!r} is VOID: it used a fixed test secret, and there "
            f"is no privacy in it. Launch it without DPSWEEP_TEST_SECRET; or register it as void "
            f"with --allow-void"
        )
    uri, origin = folder.tracking_uri or state.tracking_uri, origin_of(study)
    return [
        _register_one(r, origin, folder, uri, _make_model_name(name, r), alias, void=void)
        for r in best
    ]


class ServedModel(nn.Module):
    """A trained model that takes one tensor: images, or named inputs stacked.

    Images are whole numbers as they are stored, such as bytes, or floats in [0, 1]. Which of both
    is known when the model is called, as `torch.export` keeps no `if` on the type of an input.

    Args:
        model: Takes scaled images.
        config: The trial it was trained by.
    """

    _one: Tensor

    def __init__(self, model: nn.Module, config: TrialConfig) -> None:
        super().__init__()
        self.model = model
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)
        none = torch.empty(0)
        data = config.data
        self._scale = Dataset(
            *(none,) * 4, data.spec.brightest, data.normalise, not data.are_pixels
        )
        self._are_pixels, self._brightest = data.are_pixels, data.spec.brightest
        self._names = [field.name for field in data.spec.fields]
        self.register_buffer("_one", torch.ones(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (B, ...) for images, features, or ids and masks (B, names, T)."""
        given: Inputs = self._restore_pixels(inputs) if self._are_pixels else inputs
        if self._names:
            given = dict(zip(self._names, inputs.unbind(1), strict=True))
        return apply_model(self.model, self._scale.scaled(given, self._dtype))

    def _restore_pixels(self, images: Tensor) -> Tensor:
        """Return pixels as they are stored, in float32, of whole numbers or floats in [0, 1]."""
        # not .to(float32): the graph would then check that images have the example's type for ever
        is_float = 2 * torch.full_like(images, 0.5).type_as(self._one)  # whole numbers hold no 0.5
        pixels = images.type_as(self._one) * (1 + (self._brightest - 1) * is_float)
        fits = (pixels >= 0) & (pixels <= self._brightest)
        words = f"images hold whole numbers from 0 to {self._brightest}, or floats from 0 to 1"
        torch._assert_async(fits.all(), words)  # torch._check takes no tensor
        return pixels


def trained(winner: Winner) -> ServedModel:
    """The winner's model, with the weights that were kept; in evaluation mode, on the CPU.

    Raises:
        StateError: If its weights were not kept.
    """
    weights, config = kept_weights(winner), winner.record.config
    model = config.model.build_for(config.data.spec)
    model.to(getattr(torch, config.train.dtype))
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return ServedModel(model, config).eval()


def _register_one(
    record: Record,
    origin: Origin,
    folder: SweepFolder,
    uri: str,
    name: str,
    alias: str,
    *,
    void: bool,
) -> Registered:
    winner = Winner(record, 1, origin, folder.trial_dir(record.number) / "weights.pt")
    trial = f"{origin.sweep}/{record.number}"
    with tempfile.TemporaryDirectory() as place:
        model, reason = _make_stored(winner, Path(place))
        note = _note(winner, pipeline=isinstance(model, Pipeline))
        entry = ModelEntry(name, alias, folder.id, trial, note, _tags(record, void=void))
        with use_torch_defaults():  # torch.export reads a flag that our own settings make invalid
            found = register_model(uri, entry, model)
    words = _describe_version(found, alias)
    return Registered(
        name,
        found.version,
        record.number,
        f"models:/{name}@{alias}",
        f"{words}. It takes token ids, not texts: {reason}" if reason else words,
    )


def _make_stored(winner: Winner, folder: Path) -> tuple[Graph | Pipeline, str]:
    """Make what is stored of a winner, and say why a language model is stored as a graph."""
    config, reason = winner.record.config, ""
    if isinstance(config.model, HuggingFace):
        found = _make_pipeline(winner, folder / "pipeline")
        if isinstance(found, Pipeline):
            return found, ""
        reason = found
    return Graph(trained(winner), _make_example(config.data)), reason


def _make_pipeline(winner: Winner, folder: Path) -> Pipeline | str:
    """Write a language model as a pipeline of transformers to `folder`, or say why not."""
    config = winner.record.config
    data, task = config.data, config.data.task
    if not isinstance(data, TextData | GenerationData):
        return f"the tokens are made by data.name: {data.name}"
    one_number = isinstance(task, Regression) and len(data.targets) == 1
    if isinstance(data, TextData) and not isinstance(task, Classification) and not one_number:
        return (
            f"MLflow's transformers flavour gives one label or one number for a text, and the task "
            f"is {task.name}"
        )
    reason = write_pipeline(config, load_trained(config, kept_weights(winner)), folder)
    if reason:
        return reason
    if isinstance(data, GenerationData):
        separator = data.separator.replace("{", "{{").replace("}", "}}")
        call = {"max_new_tokens": data.task.max_tokens, "return_full_text": False}
        return Pipeline(folder, "text-generation", (), call, f"{{prompt}}{separator}")
    fixed = {"padding": "max_length", "truncation": True, "max_length": data.length}
    names = () if isinstance(data.text, str) else ("text", "text_pair")
    return Pipeline(folder, "text-classification", names, fixed)


def _make_example(data: DataConfig) -> Tensor:
    """Make inputs of two examples: of zeros; ids and masks are ones.

    Raises:
        ConfigError: If named inputs cannot be stacked.
    """
    fields = data.spec.fields
    if not fields:
        kind = torch.uint8 if data.are_pixels else torch.float32
        return torch.zeros(2, *data.spec.shape, dtype=kind)
    if len({field.shape for field in fields}) > 1 or any(
        x.num_ids is None and not x.is_mask for x in fields
    ):
        raise ConfigError(
            f"--register: MLflow gives a model one array, and the inputs of {data.name} are no ids "
            f"of one length: {', '.join(f'{x.name} {x.shape}' for x in fields)}. Export with "
            f"--format yaml"
        )
    return torch.ones(2, len(fields), *fields[0].shape, dtype=torch.int64)


def _note(winner: Winner, *, pipeline: bool) -> str:
    record, origin = winner.record, winner.origin
    config = record.config
    outputs = config.data.task.outputs_words
    use = f"Takes {_describe_inputs(config)}, and gives {outputs}."
    return "\n\n".join(
        (
            f"Trial {record.number} of sweep {origin.sweep}. "
            f"{origin.describe_selection_bias(record)}",
            f"**Privacy of this run by itself:** {describe_trial_privacy(record)}",
            f"**Privacy of the search:** {origin.search_words}",
            _describe_pipeline(config) if pipeline else use,
        )
    )


def _describe_pipeline(config: TrialConfig) -> str:
    data = config.data
    if isinstance(data, GenerationData):
        return (
            f"Takes prompts, and gives the text that follows. mlflow.pyfunc puts the separator "
            f"{data.separator!r} behind each prompt; the pipeline of mlflow.transformers does not."
        )
    assert isinstance(data, TextData)
    given = "texts"
    if not isinstance(data.text, str):
        given = f"pairs of texts, as text ({data.text[0]}) and text_pair ({data.text[1]})"
    score = "its probability"
    if isinstance(data.task, Regression):
        score = "the number, in its own unit"
    return (
        f"Takes {given}, and gives label and score, which is {score}. mlflow.pyfunc cuts texts to "
        f"{data.length} tokens; call the pipeline of mlflow.transformers with truncation=True."
    )


def _describe_inputs(config: TrialConfig) -> str:
    if fields := config.data.spec.fields:
        names = ", ".join(field.name for field in fields)
        length = fields[0].shape[0]
        return f"whole numbers (examples, {len(fields)}, {length}): {names}, stacked in this order"
    shape = format_shape(config.data.spec.shape)
    if config.data.are_pixels:
        brightest = config.data.spec.brightest
        return (
            f"images, each {shape} (channels, height, width): whole numbers from 0 to {brightest}, "
            f"such as uint8, or floats from 0 to 1. It scales them itself"
        )
    if config.data.features is None:
        return f"rows of a table as data.columns encodes them, each {shape}"
    return f"the features of images that data.features names, each {shape}"


def _metric(config: TrialConfig) -> str:
    return f"valid/{config.data.task.metric_names[0]}"


def _tags(record: Record, *, void: bool) -> dict[str, str]:
    """To filter by; epsilon is of this run alone, the search's stands in the description."""
    config, run = record.config, get_charged_run(record)
    epsilon = record.epsilon or run.epsilon(config.delta)
    return {
        "epsilon": NO_EPSILON if void else format_epsilon(epsilon),
        "epsilon.covers": "this run by itself; for the search see the description",
        "delta": format_delta(config.delta),
        "method": config.method.name,
        "model": config.model.name,
        "data": config.data.name,
        **_name_classes(config),
        "void": str(void).lower(),
        **{k: f"{v:.4f}" for k, v in (record.row or {}).items() if k == _metric(config)},
    }


def _name_classes(config: TrialConfig) -> dict[str, str]:
    """The class of each logit, as a JSON list."""
    if not isinstance(config.data.task, Classification):
        return {}
    names = json.dumps(list_class_names(config.data), ensure_ascii=False)
    return {"classes": names} if len(names) <= _LONGEST_TAG else {}


def _make_model_name(name: str, record: Record) -> str:
    epsilon = record.hyperparams.get(EPSILON)
    return name if epsilon is None else f"{name}-epsilon-{epsilon:g}"


def _describe_version(found: Version, alias: str) -> str:
    new = "registered" if found.is_new else "was registered before"
    moved = "" if found.before is None else f", which was version {found.before}"
    return f"models:/{found.name}@{alias}{moved}: version {found.version} {new}"
