"""What is sent to a cluster with a sweep: its file, made whole, and the user's own code if needed.

Left out of the project is what .gitignore and .dpsweepignore name there, and what nobody wants to
send: environments, caches, results, and files that hold secrets.
"""

import os
from pathlib import Path
from typing import Any

import pathspec
import yaml

from dpsweep.config.sweep import Sweep
from dpsweep.core.disk import shown_bytes
from dpsweep.core.errors import ConfigError

MOST_BYTES = 100 * 1000**2
"""Of all that is sent, unpacked; Ray keeps it in the memory of the cluster's head."""

_PATHS = ("folder", "weights")
"""Keys of the model section that name files."""

IGNORE_FILES = (".gitignore", ".dpsweepignore")
_ALWAYS = """
.git/
.hg/
.svn/
.venv/
venv/
node_modules/
__pycache__/
*.py[cod]
.*_cache/
.ipynb_checkpoints/
.dpsweep/
mlruns/
mlartifacts/
mlflow.db
runs/
.env
.env.*
.netrc
.pgpass
.ray/
.ssh/
.aws/
auth_token
*token*.txt
*.pem
*.key
id_rsa*
id_ed25519*
"""


def packed(sweep: Sweep, project: Path | None) -> tuple[str, dict[str, bytes]]:
    """The name of the sweep's file among what is sent, and all of that by relative path.

    Args:
        sweep: What is launched. Its base and what --set said are written into the one file.
        project: Folder of the user's code; None for the current one, if a model needs it.

    Raises:
        ConfigError: If it is too large.
    """
    here = project or Path()
    model = _with_relative_paths(sweep.base.tree.get("model"), here.resolve())
    needed = project or any(_is_users(config.model, here.resolve()) for config in sweep.corners())
    files = _project(here) if needed else {}
    name = f"{sweep.name}.submitted.yaml"
    base = {**sweep.base.tree, **({"model": model} if model is not None else {})}
    tree = {**sweep.file.tree, "base": base}
    files[name] = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()
    _check_sizes({name: len(content) for name, content in files.items()}, here)
    return name, files


def _is_users(model: Any, here: Path) -> bool:
    """True for a model that is code or a file in the user's folder."""
    paths = [getattr(model, key, None) for key in _PATHS]
    return model.name == "own" or any(path and _inside(path, here) for path in paths)


def _with_relative_paths(model: Any, here: Path) -> Any:
    """The model section of a trial, paths in the user's folder written relative to it.

    A job runs in a copy of that folder. Other paths are left alone: they are the cluster's.
    """
    if not isinstance(model, dict):
        return model
    inside = {k: v for k, v in model.items() if k in _PATHS and v and _inside(v, here)}
    return {**model, **{key: os.path.relpath(Path(v), here) for key, v in inside.items()}}


def _inside(path: str, here: Path) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(here)


def _project(root: Path) -> dict[str, bytes]:
    """The files of a project that are sent; links that lead out of it are not."""
    if not root.is_dir():
        raise ConfigError(f"--project {root}: is no folder")
    lines = _ALWAYS.splitlines()
    for name in IGNORE_FILES:
        if (root / name).is_file():
            lines += (root / name).read_text(errors="replace").splitlines()
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    places = dict[str, Path]()
    for where, below, names in os.walk(root):
        folder = Path(where)
        here = folder.relative_to(root)
        below[:] = [n for n in below if not ignored.match_file(f"{here / n}/")]
        for name in names:
            place = folder / name
            inside = place.resolve().is_relative_to(root.resolve()) and place.is_file()
            if inside and not ignored.match_file(here / name):
                places[str(here / name)] = place
    _check_sizes({name: place.stat().st_size for name, place in places.items()}, root)
    return {name: place.read_bytes() for name, place in places.items()}


def _check_sizes(sizes: dict[str, int], root: Path) -> None:
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({shown_bytes(sizes[name])})" for name in largest)
        raise ConfigError(
            f"{root.resolve()}: {shown_bytes(total)} in {len(sizes)} files would be sent to the "
            f"cluster, and at most {shown_bytes(MOST_BYTES)} may be. The largest: {shown}. Name "
            f"what is not needed in {root / '.dpsweepignore'}, a pattern a line as in .gitignore, "
            f"or a smaller folder with --project FOLDER. Data belong on every node: data.root"
        )
