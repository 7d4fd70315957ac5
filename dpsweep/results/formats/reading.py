"""The Python code that reads a trial's data, for scripts that run without us.

What it defines: `read(data)`, `data` being data.root -> training images, training labels, and the
images and labels that measure, as bytes (N, C, H, W) and whole numbers (N,); `scaled(images)` ->
what the model takes.
"""

from dataclasses import dataclass
from string import Template

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import derive_public_seed
from dpsweep.data.datasets import ImageData

_TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "kmnist": "KMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}

_DIGITS = '''
def splits(data):
    """scikit-learn's handwritten digits; every fifth image is the test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]
'''

_VISION = '''
def splits(data):
    """Both splits, as torchvision keeps them in the folder `data`."""
    from torchvision import datasets

    found = []
    for train in (True, False):
        part = datasets.$kind(data, train=train)
        images = torch.as_tensor(part.data)
        images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
        found += [images.contiguous(), torch.as_tensor(part.targets).long()]
    return tuple(found)
'''

_NPZ = '''
def splits(data):
    """Both splits, from the NumPy file `data`."""
    found = []
    with np.load(data, allow_pickle=False) as file:
        for names in (TRAIN_NAMES, TEST_NAMES):
            pair = next(((a, b) for a, b in names if a in file and b in file), None)
            if pair is None:
                found += [found[0][:0], found[1][:0]]
                continue
            images, labels = (torch.from_numpy(file[name]) for name in pair)
            if images.dim() == 3:
                images = images.unsqueeze(1)
            elif tuple(images.shape[1:]) != SHAPE:
                images = images.permute(0, 3, 1, 2)
            found += [images.contiguous(), labels.reshape(-1).long()]
    return tuple(found)


TRAIN_NAMES = (("x_train", "y_train"), ("train_images", "train_labels"))
TEST_NAMES = (
    ("val_images", "val_labels"),
    ("x_test", "y_test"),
    ("test_images", "test_labels"),
)
'''

_FOLDER = '''
def splits(data):
    """Both splits of the folder `data`: a folder for each class, in the order of their names."""
    root = Path(data)
    train = root / "train" if (root / "train").is_dir() else root
    classes = sorted(p.name for p in train.iterdir() if p.is_dir() and p.name[0] != ".")
    tests = (root / name for name in ("val", "valid", "validation", "test"))
    test = next((p for p in tests if train != root and p.is_dir()), None)
    images, labels = split(train, classes)
    if test is None:
        return images, labels, images[:0], labels[:0]
    return images, labels, *split(test, classes)


def split(folder, classes):
    """All images below one folder, and the numbers of their classes."""
    found = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.name[0] != "."
    ]
    return torch.stack([pixels(path) for path, _ in found]), torch.tensor([n for _, n in found])


SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip
'''

_PIXELS = '''
def pixels(path):
    """One image file as bytes, shape (C, H, W)."""
    channels, height, width = SHAPE
    image = Image.open(path).convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        $other
    return torch.from_numpy(np.array(image)).view(height, width, channels).permute(2, 0, 1)
'''

_RESIZED = "image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)"
_REFUSED = (
    """raise SystemExit(f"{path}: is {image.size}, and the model takes {width} x {height}")"""
)

_TEST_SPLIT = '''
def read(data):
    """Training images and labels, and the test split, which was declared public."""
    return splits(data)
'''

_HOLDOUT = '''
def read(data):
    """Training images and labels, and those that were held out of them to measure with."""
    images, labels, _, _ = splits(data)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed($seed))
    held, kept = order[:$num], order[$num:]
    return images[kept], labels[kept], images[held], labels[held]
'''

_SCALED = '''
def scaled(images):
    """Pixels in [-1, 1]."""
    return images.to($dtype) * (2 / $brightest) - 1
'''

_NORMALISED = '''
def scaled(images):
    """Pixels shifted and scaled by constants that were declared public."""
    mean, std = (
        torch.tensor(each, dtype=$dtype, device=images.device)[:, None, None]
        for each in ($mean, $std)
    )
    return (images.to($dtype) / $brightest - mean) / std
'''


@dataclass(frozen=True)
class Reading:
    """Code by which a script reads its data."""

    imports: tuple[str, ...]  # lines its code needs besides `import torch`
    code: str  # `read`, `scaled`, and what they need; expects the constant SHAPE
    pixels: str  # `pixels(path)`, which reads one image file; in `code` already if that needs it
    # lines that `pixels` needs
    pixels_imports: tuple[str, ...] = ("import numpy as np", "from PIL import Image, ImageOps")


def reading_code(config: TrialConfig) -> Reading:
    """Write the code that reads a trial's data.

    Raises:
        ConfigError: If they cannot be read in a few lines.
    """
    data = config.data
    if not isinstance(data, ImageData):
        language = "--format huggingface, " if config.model.name == "huggingface" else ""
        raise ConfigError(
            f"data.name: scripts are written for images, and {data.name} has none. Export with "
            f"{language}--format yaml or --register NAME"
        )
    if data.features is not None:
        raise ConfigError(
            f"data.features: {data.features.name} is computed by a package of its own, and no "
            f"script of ours has it. Export with --format yaml or --register NAME"
        )
    imports, splits = _splits(data)
    if data.num_held_out:
        read = _fill_template(
            _HOLDOUT, seed=derive_public_seed(config.seed, "holdout"), num=data.num_held_out
        )
    else:
        read = _TEST_SPLIT
    pixels = _fill_template(_PIXELS, other=_RESIZED if data.resize else _REFUSED)
    if data.name == "folder":
        splits += f"\n{pixels}"
    code = "\n".join((splits, read, scaling_code(config)))
    return Reading(imports, code, pixels)


def scaling_code(config: TrialConfig) -> str:
    """`scaled`, which makes of bytes what the model takes."""
    values: dict[str, object] = {
        "dtype": f"torch.{config.train.dtype}",
        "brightest": config.data.spec.brightest,
    }
    if normalise := config.data.normalise:
        return _fill_template(_NORMALISED, **values, mean=normalise.mean, std=normalise.std)
    return _fill_template(_SCALED, **values)


def _splits(data: ImageData) -> tuple[tuple[str, ...], str]:
    if data.name == "digits":
        return (), _DIGITS
    if data.name in _TORCHVISION:
        return (), _fill_template(_VISION, kind=_TORCHVISION[data.name])
    if data.name == "npz":
        return ("import numpy as np",), _NPZ
    if data.name == "folder":
        return Reading.pixels_imports, _FOLDER
    raise ConfigError(
        f"data.name: {data.name} has a layout of its own, which no script of ours reads. Export "
        f"with --format yaml or --register NAME"
    )


def _fill_template(template: str, **values: object) -> str:
    return Template(template).substitute(values)
