"""A winner of DP-SGD or DP-Adam as a training script for Opacus, which needs nothing of ours.

The script has the trial's sigma, sampling rate, steps, clip norm, schedule and model. Its noise
and its batches are drawn afresh from the operating system's entropy each time it runs: a seed in
a script would be a seed that everybody has. Opacus does the per-example gradients and the
clipping; sampling, noise and divisor are written out, so that a reader can check each.
"""

import re
from string import Template

import torch
from torch import nn

from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import derive_public_seed
from dpsweep.models import build_model
from dpsweep.optim.adam import Adam, AdamW
from dpsweep.optim.schedule import Cosine
from dpsweep.optim.sgd import Sgd
from dpsweep.privacy.engine import make_engine
from dpsweep.privacy.geometry import IDENTITY
from dpsweep.privacy.release import GRID_BITS
from dpsweep.privacy.statement import format_delta, format_epsilon
from dpsweep.results.formats.layers import model_code
from dpsweep.results.formats.reading import reading_code

_METHODS = ("dp_sgd", "dp_adam")
_TRIED_AT_ONCE = 2

_SCRIPT = '''
"""Trains with differential privacy, by Opacus alone: python THIS_FILE [DATA]."""

import copy
import math
import sys
import warnings
from pathlib import Path

$imports

DATA = sys.argv[1] if len(sys.argv) > 1 else $root
SHAPE = $shape
NUM_EXAMPLES = $num_examples  # a public figure
EPSILON, DELTA = $epsilon, $delta  # of this run by itself

BATCH_SIZE = $batch_size  # what a Poisson batch has on average, and what gradients are divided by
SAMPLING_RATE = BATCH_SIZE / NUM_EXAMPLES
STEPS = $steps
NOISE_MULTIPLIER = $sigma  # standard deviation of the noise, in units of CLIP_NORM
CLIP_NORM = $clip_norm  # of one example's gradient
LEARNING_RATE = $lr
EVALUATE_EVERY = $evaluate_every  # steps
PORTION = 256  # examples computed at once; changes memory and speed, the result but for rounding
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The secret of this run: batches and noise. Never give it a seed, and never store it: whoever
# knows it can take the noise off. NumPy asks the operating system for 128 bits.
SECRET = np.random.Generator(np.random.Philox())

$definitions

def make_model():
    """The model, with its public first weights."""
    torch.manual_seed($weights_seed)
    return $model


def make_optimizer(parameters):
    """What moves the weights by the noised gradients."""
    return $optimizer


def learning_rate(step):
    """The learning rate at a step, counted from 0."""
$schedule


class Private(DPOptimizer):
    """Opacus' optimizer, whose noise is drawn from SECRET, in double precision.

    An example whose gradient is not finite, or too large to be clipped, counts as zero: a NaN
    would pass the clipping, and carry one example past its bound. The noisy sum is rounded to a
    grid that is the same for all data: the low bits of a sum tell how large its terms were
    (Mironov 2012).
    """

    def clip_and_accumulate(self):
        squares = sum(p.grad_sample.unsqueeze(-1).flatten(1).square().sum(1) for p in self.params)
        usable = squares <= 1e36  # false for NaN
        for p in self.params:
            rows = usable.view(-1, *(1,) * (p.grad_sample.dim() - 1))
            p.grad_sample = torch.where(rows, p.grad_sample, 0)
        super().clip_and_accumulate()

    def add_noise(self):
        std = self.noise_multiplier * self.max_grad_norm
        grid = 2.0 ** (math.floor(math.log2(std)) - $grid_bits) if std else 0.0
        for p in self.params:
            noise = torch.from_numpy(SECRET.standard_normal(tuple(p.shape)))
            total = p.summed_grad.cpu().double() + std * noise
            if grid:
                total = (total / grid).round() * grid
            p.grad = total.to(p)
$reading

def private_step(model, optimizer, images, labels):
    """One step: a Poisson batch, each gradient clipped, the sum noised, divided by BATCH_SIZE."""
    batch = torch.from_numpy(np.flatnonzero(SECRET.random(NUM_EXAMPLES) < SAMPLING_RATE))
    portions = torch.split(batch.to(DEVICE), PORTION)  # an empty batch is one empty portion
    for number, portion in enumerate(portions, 1):
        optimizer.zero_grad()
        if len(portion):
            logits = model(scaled(images[portion]))
            nn.functional.cross_entropy(logits, labels[portion], reduction="sum").backward()
        else:  # noise alone
            for p in optimizer.params:
                p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype, device=p.device)
        optimizer.signal_skip_step(number < len(portions))  # the last portion takes the step
        optimizer.step()


@torch.no_grad()
def accuracy(model, images, labels):
    """Share of images classified rightly."""
    chunks = zip(torch.split(images, 1000), torch.split(labels, 1000))
    right = sum(int((model(scaled(x)).argmax(1) == y).sum()) for x, y in chunks)
    return right / len(labels)


def main():
    images, labels, valid_images, valid_labels = (part.to(DEVICE) for part in read(DATA))
    assert len(images) == NUM_EXAMPLES, f"{len(images)} examples, and {NUM_EXAMPLES} were planned"
    plain = make_model().to(DEVICE, $dtype)
    result = plain$average_start
    model = GradSampleModule(plain, loss_reduction="sum")
    warnings.filterwarnings("ignore", message="Full backward hook")  # images need no gradient
    optimizer = Private(
        make_optimizer(model.parameters()),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=BATCH_SIZE,
    )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        private_step(model, optimizer, images, labels)$average_step
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == STEPS:  # on public images alone
            shown = accuracy(result, valid_images, valid_labels)
            print(f"step {step + 1}/{STEPS}  accuracy {shown:.4f}", flush=True)

    place = Path(__file__).with_suffix(".trained.pt")
    weights = dict(result.named_parameters(remove_duplicate=False))  # noised, unlike what else
    weights |= dict(result.named_buffers(remove_duplicate=False))  # a model's state_dict may save
    torch.save({name: x.detach() for name, x in weights.items()}, place)
    print(f"accuracy {shown:.4f}; sigma {NOISE_MULTIPLIER!r}; weights in {place.name}")
    print("$figure, for this run by itself")


if __name__ == "__main__":
    main()
'''

_AVERAGE_START = "\n    result = copy.deepcopy(plain)  # a moving average over the iterates"
_AVERAGE_STEP = """
        newest = (1 - $ema) / (1 - $ema ** (step + 1))
        for mean, now in zip(result.parameters(), plain.parameters()):
            mean.data.lerp_(now.data, newest)"""

_IMPORTS = (
    "import numpy as np",
    "import torch",
    "from opacus import GradSampleModule",
    "from opacus.optimizers import DPOptimizer",
    "from torch import nn",
)


def to_opacus(config: TrialConfig) -> str:
    """The script's text, without its header.

    Raises:
        ConfigError: If Opacus alone cannot train this trial; with the reason and the remedy.
    """
    refuse_what_opacus_lacks(config)
    plan, reading, model = plan_privacy(config), reading_code(config), model_code(config)
    imports = (*_IMPORTS, *model.imports, *reading.imports)
    text = Template(_SCRIPT).substitute(
        imports=import_lines(imports),
        root=repr(config.data.root),
        shape=config.data.spec.shape,
        num_examples=plan.num_examples,
        epsilon=_number(plan.epsilon),
        figure=f"({format_epsilon(plan.epsilon)}, {format_delta(plan.delta)})-DP",
        delta=plan.delta,
        batch_size=config.train.batch_size,
        steps=plan.steps,
        sigma=repr(plan.run.noise_multiplier),
        clip_norm=config.privacy.clip_norm,
        lr=config.learning_rate,
        evaluate_every=plan.step_after(config.train.evaluate_every),
        definitions=f"\n{model.definitions}\n" if model.definitions else "",
        weights_seed=derive_public_seed(config.seed, "weights"),
        model=model.expression.replace("\n", "\n    "),
        optimizer=_optimizer(config),
        schedule=_schedule(config),
        reading=reading.code,
        dtype=f"torch.{config.train.dtype}",
        grid_bits=GRID_BITS,
        average_start=_AVERAGE_START if config.train.ema else "",
        average_step=_average_step(config.train.ema),
    )
    return tidy(text)


def tidy(text: str) -> str:
    """Two empty lines at most, where a part of the template is not used."""
    return re.sub(r"\n{4,}", "\n\n\n", text)


def refuse_what_opacus_lacks(config: TrialConfig) -> None:
    """Raise ConfigError for a trial that plain DP-SGD or DP-Adam of Opacus is not."""
    name = config.method.name
    if name not in _METHODS:
        raise _refuse(f"method.name: {name} is not in Opacus, which has {' and '.join(_METHODS)}")
    clipping, train, model = config.privacy.clipping.name, config.train, config.model
    reading_code(config)  # first: what is tried below is tried on images
    if getattr(config.data.task, "class_weights", None) is not None:
        raise _refuse("data.task.class_weights: the script's loss is plain cross-entropy")
    if clipping != "flat":
        raise _refuse(f"privacy.clipping: {clipping} is not what Opacus does; flat is")
    if config.privacy.noise.source != "fast":
        raise _refuse(
            "privacy.noise.source: secure draws from a cipher; Opacus' own secure mode needs a "
            "package that no longer installs"
        )
    if train.augment is not None:
        raise _refuse("train.augment: Opacus clips each copy of an example by itself")
    for key in ("weights", "train"):
        if getattr(model, key, None) is not None:
            raise _refuse(f"model.{key}: the script starts from fresh weights and trains all")
    _refuse_layers(config)


def _refuse_layers(config: TrialConfig) -> None:
    """Opacus' own validator has the word, and then a trial of it: does it answer rightly?

    The validator looks at layers by their kinds alone. What a model's code does between them, such
    as to mix examples, is found by trying only.
    """
    from opacus.validators import ModuleValidator  # half a second, for this export alone

    built: nn.Module = build_model(config.model, config.data.spec, config.seed)
    errors = ModuleValidator.validate(built, strict=False)
    if errors:
        told = " ".join(str(errors[0]).split())
        raise _refuse(f"model.name: {config.model.name} has layers that Opacus refuses: {told}")
    built = built.to(getattr(torch, config.train.dtype))
    shape, loss = config.data.spec.shape, nn.functional.cross_entropy
    try:
        make_engine(built, loss, IDENTITY, _TRIED_AT_ONCE, shape, "opacus")
    except ValueError as e:
        told = str(e).removesuffix(". Use auto")
        raise _refuse(f"model.name: {config.model.name} does not suit it: {told}") from e


def _refuse(reason: str) -> ConfigError:
    return ConfigError(
        f"--format opacus: {reason}. Train it again with: dpsweep train, from --format yaml; or "
        f"take its weights with --format torch"
    )


def import_lines(lines: tuple[str, ...]) -> str:
    """Import lines in one block, each once."""
    return "\n".join(sorted(set(lines), key=lambda line: (not line.startswith("import"), line)))


def _number(x: float) -> str:
    return 'float("inf")' if x == float("inf") else repr(x)


def _optimizer(config: TrialConfig) -> str:
    own = config.optimizer
    start = "parameters, lr=LEARNING_RATE"
    match own:
        case Sgd():
            kind, more = "SGD", f"momentum={own.momentum}"
        case Adam() | AdamW():
            kind = type(own).__name__
            more = f"betas=({own.beta1}, {own.beta2}), eps={own.eps}"
        case _:
            raise _refuse(f"optimizer.name: {own.name} is not one of torch's")
    return f"torch.optim.{kind}({start}, {more}, weight_decay={own.weight_decay})"


def _schedule(config: TrialConfig) -> str:
    schedule, lines = config.optimizer.schedule, list[str]()
    if schedule.warmup:
        lines += [
            f"    warmup = {schedule.warmup} * STEPS",
            "    if step < warmup:",
            "        return LEARNING_RATE * min(1.0, (step + 1) / warmup)",
        ]
    if isinstance(schedule, Cosine):
        through = "(step - warmup) / (STEPS - warmup)" if schedule.warmup else "step / STEPS"
        lines += [
            f"    through = {through}",
            "    cosine = (1 + math.cos(math.pi * through)) / 2",
            f"    return LEARNING_RATE * ({schedule.final} + {1 - schedule.final} * cosine)",
        ]
    else:
        lines += ["    return LEARNING_RATE"]
    return "\n".join(lines)


def _average_step(ema: float | None) -> str:
    return "" if ema is None else Template(_AVERAGE_STEP).substitute(ema=ema)
