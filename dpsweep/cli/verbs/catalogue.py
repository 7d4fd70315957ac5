"""The verbs that show what can be trained, and on what: models, data."""

import json
from pathlib import Path

from dpsweep.cli.say import console
from dpsweep.config.source import dump_yaml
from dpsweep.core.errors import format_shape, unknown_name_error
from dpsweep.data.datasets import SPECS
from dpsweep.models import MODELS
from dpsweep.models.counts import stored_num_weights
from dpsweep.models.parts import Model
from dpsweep.results.rich_table import plain_table


def models(data: str, as_json: bool) -> None:
    """Print every model with the number of its weights for images of a data set."""
    if data not in SPECS:
        raise unknown_name_error("data set", data, SPECS, where="--data")
    rows = [_row(name, kind, data) for name, kind in MODELS.items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title, words = f"Models, for {data}: {format_shape(SPECS[data].shape)}", ("model", "what it is")
    table = plain_table(title, ("model", "weights", "what it is"), words=words)
    for row in rows:
        count = f"{row['parameters']:,}" if row["parameters"] else str(row["why_not"] or "any")
        table.add_row(str(row["name"]), count, str(row["description"]))
    console().print(table)


def data(place: Path) -> None:
    """Print the data section of a trial for images of the user's own."""
    from dpsweep.data.inspection import inspect_data  # reads images, with torch

    found = inspect_data(place).section
    print(f"# {place}: paste this into a trial or the base of a sweep.")
    print(dump_yaml({"data": found}), end="")


def _row(name: str, kind: type[Model], data: str) -> dict[str, object]:
    count = stored_num_weights(name, data)
    return {
        "name": name,
        "parameters": count if isinstance(count, int) else None,
        "why_not": count if isinstance(count, str) else None,
        "description": (kind.__doc__ or "").split("\n")[0],
    }
