"""The verbs that show what can be trained, and on what: models, data."""

import json
from collections import Counter
from pathlib import Path

from dpsweep.cli.say import console
from dpsweep.config.source import yaml_text
from dpsweep.core.errors import ConfigError, unknown
from dpsweep.data.datasets import SPECS
from dpsweep.models import MODELS
from dpsweep.models.counts import num_weights
from dpsweep.models.parts import Model
from dpsweep.results.rich_table import plain_table


def models(data: str, as_json: bool) -> None:
    """Prints every model with the number of its weights for images of a data set."""
    if data not in SPECS:
        raise unknown("data set", data, SPECS, where="--data")
    rows = [_row(name, kind, data) for name, kind in MODELS.items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    channels, height, width = SPECS[data].shape
    table = plain_table(f"Models, for {data}: {channels} x {height} x {width}")
    for heading in ("model", "weights", "what it is"):
        table.add_column(heading, justify="right" if heading == "weights" else "left")
    for row in rows:
        count = f"{row['parameters']:,}" if row["parameters"] else str(row["why_not"] or "any")
        table.add_row(str(row["name"]), count, str(row["description"]))
    console().print(table)


def data(place: Path) -> None:
    """Prints the data section of a trial for images of the user's own."""
    found = _npz(place) if place.suffix == ".npz" else _folder(place)
    print(f"# {place}: paste this into a trial or the base of a sweep.")
    print(yaml_text({"data": found}), end="")


def _row(name: str, kind: type[Model], data: str) -> dict[str, object]:
    count = num_weights(name, data)
    return {
        "name": name,
        "parameters": count if isinstance(count, int) else None,
        "why_not": count if isinstance(count, str) else None,
        "description": (kind.__doc__ or "").split("\n")[0],
    }


def _folder(root: Path) -> dict[str, object]:
    from dpsweep.data import folders

    if not root.is_dir():
        raise ConfigError(f"{root}: is neither a folder nor an .npz file")
    listing = folders.listed(root)
    sizes = Counter(folders.size_of(image) for image, _ in listing.train)
    shape = sizes.most_common(1)[0][0] if sizes else (3, 32, 32)
    found: dict[str, object] = {
        "name": "folder",
        "root": str(root),
        "shape": list(shape),
        "num_classes": len(listing.classes),
        "num_train": len(listing.train),
    }
    found |= _measured_on(len(listing.test))
    return found | ({"resize": True} if len(sizes) > 1 else {})


def _npz(path: Path) -> dict[str, object]:
    from dpsweep.data import npz

    found = npz.sizes(path)
    train, test = npz.names_of(found, test=False), npz.names_of(found, test=True)
    if train is None:
        raise ConfigError(f"{path}: holds {', '.join(sorted(found))}, and no training images")
    num, *sides = found[train[0]]
    match sides:
        case [height, width]:
            shape = [1, height, width]
        case [height, width, (1 | 3) as channels]:
            shape = [channels, height, width]
        case _:
            shape = sides
    return {
        "name": "npz",
        "root": str(path),
        "shape": shape,
        "num_classes": npz.num_classes(path, train[1]),
        "num_train": num,
        **_measured_on(found[test[0]][0] if test else 0),
    }


def _measured_on(num_test: int) -> dict[str, object]:
    return {"num_test": num_test} if num_test else {"validation": "holdout"}
