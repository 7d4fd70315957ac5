"""Options and arguments that several verbs share, and how options are typed."""

from pathlib import Path
from typing import Annotated, Any

import typer

SweepFile = Annotated[Path, typer.Argument(help="A sweep file; dpsweep init writes one.")]
Name = Annotated[str, typer.Argument(help="Name of a launched sweep.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        "--state", metavar="FOLDER", help="State folder [default: DPSWEEP_STATE, or ./.dpsweep]."
    ),
]
Fetch = Annotated[bool, typer.Option("--download", help="Fetch missing data into data.root.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster: auto or HOST:PORT [default: an embedded one].")
]
AddressHereOrAway = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster: auto, HOST:PORT, or ray://HOST:PORT from elsewhere (as submit) "
        "[default: an embedded one]."
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the study, such as postgresql://USER@HOST/DB [default: DPSWEEP_STORAGE, "
        "or a file in the state folder]. Written down at launch: later verbs need it only if the "
        "database has moved.",
    ),
]
BestFile = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Where the best config goes [default: best.yaml]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[
    bool, typer.Option("--force", help="Do it to somebody else's sweep, named OWNER/NAME.")
]

_SPELLED = {"as_json": "--json", "accept": "--accept-changes"}


def format_options(options: dict[str, Any]) -> list[str]:
    """Format options as they are typed.

    >>> format_options({"top": 3, "as_json": True, "force": False, "storage": None})
    ['--top', '3', '--json']
    """
    words = list[str]()
    for key, value in options.items():
        if value is not None and value is not False:
            words.append(_SPELLED.get(key, f"--{key}"))
            words += [] if value is True else [f"{value}"]
    return words
