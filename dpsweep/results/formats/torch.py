"""A winner's weights and a script that uses them with torch alone: load, scale, predict, check.

It is made to be given away: it does not say where the private data lie.
"""

from string import Template

from dpsweep.config.trial import TrialConfig
from dpsweep.results.formats.layers import model_code
from dpsweep.results.formats.opacus import import_lines, tidy
from dpsweep.results.formats.reading import reading_code

_SCRIPT = '''
"""Classifies images with the trained model beside this file; needs torch and nothing of dpsweep.

    python THIS_FILE IMAGE...              the class of each image
    python THIS_FILE --check DATA          accuracy on the images it was measured on, data.root
"""

import sys
from pathlib import Path

$imports

WEIGHTS = Path(__file__).with_suffix(".pt")
SHAPE = $shape  # channels, height, width
CLASSES = $classes
ACCURACY = $accuracy  # of these weights, when they were trained

$definitions

def make_model():
    """The model, without its weights."""
    return $model


def load():
    """The trained model."""
    model = make_model().to($dtype)
    model.load_state_dict(torch.load(WEIGHTS, map_location="cpu", weights_only=True))
    return model.eval()

$pixels
$reading

@torch.no_grad()
def predict(model, images):
    """Numbers of the likeliest classes of images in bytes, shape (N, C, H, W)."""
    return torch.cat([model(scaled(part)).argmax(1) for part in torch.split(images, 1000)])


def check(data):
    """Accuracy on the images that the training was measured on."""
    _, _, images, labels = read(data)
    return float((predict(load(), images) == labels).double().mean())


def main():
    if sys.argv[1:2] == ["--check"]:
        found = check(sys.argv[2] if len(sys.argv) > 2 else None)
        print(f"accuracy {found:.4f}, and {ACCURACY:.4f} when it was trained")
        sys.exit(abs(found - ACCURACY) > 0.001)
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    model = load()
    for name in sys.argv[1:]:
        number = int(predict(model, pixels(name).unsqueeze(0)))
        print(f"{name}  {CLASSES[number]}")


if __name__ == "__main__":
    main()
'''


def to_torch(config: TrialConfig, accuracy: float, classes: list[str]) -> str:
    """The script's text, without its header; ConfigError if model or data cannot be written out."""
    reading, model = reading_code(config), model_code(config)
    imports = ("import torch", "from torch import nn", *model.imports, *reading.imports)
    pixels = "" if reading.pixels in reading.code else reading.pixels
    text = Template(_SCRIPT).substitute(
        imports=import_lines((*imports, *reading.pixels_imports)),
        shape=config.data.spec.shape,
        classes=classes,
        accuracy=accuracy,
        definitions=f"\n{model.definitions}\n" if model.definitions else "",
        model=model.expression.replace("\n", "\n    "),
        dtype=f"torch.{config.train.dtype}",
        pixels=pixels,
        reading=reading.code,
    )
    return tidy(text)
