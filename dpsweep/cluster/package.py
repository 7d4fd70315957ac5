"""Files that are sent to a cluster with a sweep: its file with its base, and the user's own code.

Only code of the user's brings a folder along; weights alone bring their one file. Of a folder
stay here: the trial's data, state folders and trials' directories, files that are named as secrets
are, whatever .gitignore and .dpsweepignore say of them, and what those leave out. A list of names
proves nothing about what else lies there, so `summary` says what goes.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pathspec

from dpsweep.config.source import dump_sweep
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.disk import format_bytes
from dpsweep.core.errors import ConfigError
from dpsweep.models.huggingface import HuggingFace
from dpsweep.store.state_dir import StateFolder

MOST_BYTES = 100 * 1000**2
"""Of all that is sent, unpacked; Ray keeps it in the memory of the cluster's head."""

IGNORE_FILES = (".gitignore", ".dpsweepignore")
_PATHS = ("folder", "weights")
"""Keys of the model section that name files."""

_MARKERS = frozenset({"sweep.json", "up.json", "study.db"})
"""A folder that holds one of them is a sweep, a local cluster or a state folder."""

_RUBBISH = ".venv/ venv/ node_modules/ __pycache__/ *.py[cod] .*_cache/ .ipynb_checkpoints/ runs/"
"""Left out unless an ignore file brings it back with `!`."""

_NEVER = """
.git/ .hg/ .svn/ .dpsweep/ mlruns/ mlartifacts/ mlflow.db
secret checkpoint.pt error.txt selection.json secrets.json
credentials credentials*.json service_account*.json .git-credentials .env* .netrc _netrc
.pgpass pgpass .npmrc .pypirc .htpasswd .ray/ .ssh/ .aws/ .kube/ .docker/ .gnupg/
auth_token *_token *token*.txt *.pem *.key *.p12 *.pfx id_rsa* id_dsa* id_ecdsa* id_ed25519*
"""
"""Histories, results, private files of a trial's directory, and secrets; in any case of letters."""

_Rules = list[tuple[Path, pathspec.GitIgnoreSpec]]
"""Ignore lists and the folders they speak of, the outermost first: a later one wins."""

_rubbish = pathspec.GitIgnoreSpec.from_lines(_RUBBISH.split())
_never = pathspec.GitIgnoreSpec.from_lines(_NEVER.split())


def pack_sweep(
    sweep: ResolvedSweep, project: Path | None, state: str | None = None
) -> tuple[str, dict[str, bytes]]:
    """The name of the sweep's file among what is sent, and all of that by relative path.

    Args:
        sweep: What is launched. Its base and what --set said are written into the one file.
        project: Folder of the user's code; None for the current one, if a model needs it.
        state: What --state said: if that folder is on this machine, it stays here like our own.

    Raises:
        ConfigError: If it is too large, or code lies among data or in a state folder.
    """
    root = project or Path()
    if not root.is_dir():
        raise ConfigError(f"--project {root}: is no folder")
    here, corners = root.resolve(), list(sweep.corners)
    code = {Path(folder) for c in corners if (folder := _code(c.model, here))}
    places = dict[str, Path]()
    if project or code:
        apart = _kept_apart(corners[0], state, [here, *sorted(code)])
        places = {place.relative_to(here).as_posix(): place for place in _files(here, apart)}
    places |= _weights(corners, here)
    _check_sizes({name: place.stat().st_size for name, place in places.items()}, root)
    files = {name: _read(place) for name, place in places.items()}
    model = _with_relative_paths(sweep.base.tree.get("model"), here)
    base = {**sweep.base.tree, **({"model": model} if model is not None else {})}
    name = f"{sweep.name}.submitted.yaml"
    files[name] = dump_sweep(sweep.file, base).encode()
    _check_sizes({name: len(content) for name, content in files.items()}, root)
    return name, files


def summary(files: dict[str, bytes], most: int = 12) -> str:
    """Describe the size of what is sent, and its top-level entries.

    >>> summary({"a.yaml": b"123", "nets/a.py": b"1", "nets/b.py": b"2"})
    'Sent: 3 files, 5 B: a.yaml, nets/ (2)'
    """
    tops = Counter(f"{top}{slash}" for top, slash, _ in (n.partition("/") for n in sorted(files)))
    shown = [f"{top} ({count})" if top.endswith("/") else top for top, count in tops.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    size = format_bytes(sum(map(len, files.values())))
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"Sent: {count}, {size}: {', '.join(shown[:most])}{more}"


def _code(model: Any, here: Path) -> str | None:
    """The folder of a model that is code in the user's folder; None for any other model."""
    if model.name != "own":
        return None
    folder = str(Path(model.folder).expanduser().resolve()) if model.folder else str(here)
    return folder if _inside(folder, here) else None


def _with_relative_paths(model: Any, here: Path) -> Any:
    """The model section of a trial, paths in the user's folder written relative to it.

    A job runs in a copy of that folder. Other paths are left alone: they are the cluster's.
    """
    if not isinstance(model, dict):
        return model
    inside = {k: v for k, v in model.items() if k in _PATHS and v and _inside(v, here)}
    return {**model, **{key: _relative(path, here) for key, path in inside.items()}}


def _inside(path: str, here: Path) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(here)


def _relative(path: str, here: Path) -> str:
    return Path(path).expanduser().resolve().relative_to(here).as_posix()


_LANGUAGE = ("*.json", "*.safetensors", "*.txt")
"""Files of a language model in its folder: config, weights, tokenizer."""


def _weights(corners: Sequence[TrialConfig], here: Path) -> dict[str, Path]:
    """The files of weights in the user's folder: whoever names one wants it sent."""
    named = {str(path) for c in corners if (path := getattr(c.model, "weights", None))}
    folders = {c.model.folder for c in corners if isinstance(c.model, HuggingFace)}
    for folder in map(Path, filter(None, folders)):
        named |= {str(path) for kind in _LANGUAGE for path in folder.glob(kind)}
    names = [_relative(path, here) for path in named if _inside(path, here)]
    found = {name: here / name for name in sorted(names)}
    for place in found.values():
        if not place.is_file():
            raise ConfigError(
                f"model.weights: {place} is no file. Name one that is here, to be sent, or one "
                f"that every node has, outside {here}"
            )
    return found


def _kept_apart(trial: TrialConfig, state: str | None, code: Sequence[Path]) -> list[Path]:
    """Data and state folders, which stay here even where no ignore list names them.

    Raises:
        ConfigError: If code lies in one of them.
    """
    owned = {"the state folder": StateFolder.at(None).common.resolve()}
    if state:
        owned["--state"] = Path(state).expanduser().resolve()
    owned |= {f"data.{key}": place.resolve() for key, place in trial.data.places.items()}
    for what, place in owned.items():
        if not what.startswith("data.") and StateFolder(place).owner is None:
            continue  # nobody has launched there: it may be any folder, such as the home
        for folder in code:
            if folder.is_relative_to(place):
                raise ConfigError(
                    f"--project {folder}: is in {place} ({what}), and nothing of that is sent. "
                    f"Put your code into a folder of its own, and name it with --project FOLDER"
                )
    apart = list(owned.values())
    root = Path(trial.data.root).expanduser().resolve() if trial.data.root else None
    if root and not any(folder.is_relative_to(root) for folder in code):
        apart.append(root)  # more data than the trial's own
    return apart


def _files(root: Path, apart: Sequence[Path]) -> Iterator[Path]:
    """The files of a project that are sent. A link is sent if what it leads to is."""
    plain, links = set[Path](), list[Path]()
    rules = {root.parent: [(root, _rubbish), *_rules_above(root)]}
    for where, below, names in os.walk(root):
        folder = Path(where)
        if found := sorted(_MARKERS.intersection(names)):
            if folder == root:
                raise ConfigError(
                    f"--project {root}: holds {found[0]}, so it is a state folder, and nothing of "
                    f"that is sent. Name the folder of your code with --project FOLDER"
                )
            below.clear()
            continue
        rules[folder] = [*rules[folder.parent], *_rules_in(folder)]

        def stays(name: str, end: str = "", folder: Path = folder) -> bool:
            place = folder / name
            if place in apart or _never.match_file(f"{place.relative_to(root)}{end}".lower()):
                return True
            return _is_ignored(place, end, rules[folder])

        below[:] = [name for name in below if not stays(name, "/")]
        for place in (folder / name for name in names if not stays(name)):
            if place.is_symlink():
                links.append(place)
            elif place.is_file():
                plain.add(place)
    yield from sorted({*plain, *(link for link in links if link.resolve() in plain)})


def _is_ignored(place: Path, end: str, rules: _Rules) -> bool:
    said = (spec.check_file(f"{place.relative_to(at)}{end}").include for at, spec in rules)
    return next((one for one in reversed(list(said)) if one is not None), False)


def _rules_in(folder: Path) -> _Rules:
    """The ignore lists of one folder.

    Raises:
        ConfigError: For a line that is no pattern: what it was to hold back is not known.
    """
    found: _Rules = []
    for place in (folder / name for name in IGNORE_FILES):
        if place.is_file():
            lines = _read(place).decode(errors="replace").splitlines()
            try:
                found.append((folder, pathspec.GitIgnoreSpec.from_lines(lines)))
            except ValueError as e:
                raise ConfigError(f"{place}: {e}. Mend that line, so that it means a file") from e
    return found


def _rules_above(root: Path) -> _Rules:
    """The ignore lists between a repository's top and the project in it."""
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    above = [folder for folder in root.parents if folder.is_relative_to(top)]
    return [rule for folder in reversed(above) for rule in _rules_in(folder)]


def _read(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except OSError as e:
        raise ConfigError(
            f"{place}: cannot be read ({e.strerror}). Make it readable, or name it in "
            f".dpsweepignore if the sweep does not need it"
        ) from e


def _check_sizes(sizes: dict[str, int], root: Path) -> None:
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
        raise ConfigError(
            f"{root.resolve()}: {format_bytes(total)} in {len(sizes)} files would be sent to the "
            f"cluster, and at most {format_bytes(MOST_BYTES)} may be. The largest: {shown}. Name "
            f"what is not needed in {root / '.dpsweepignore'}, a pattern a line as in .gitignore, "
            f"or a smaller folder with --project FOLDER. Data belong on every node: data.root"
        )
