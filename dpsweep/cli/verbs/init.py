"""The verb that writes files to begin with: init."""

import shlex
from pathlib import Path

from dpsweep.app.starter import DIGITS, Starter, copy_example, examples, new_starter
from dpsweep.cli.say import console
from dpsweep.config.sweep import check_name
from dpsweep.core.errors import ConfigError
from dpsweep.results.rich_table import plain_table

_DEFAULT_METHOD = "dp_sgd"
_SUFFIXES = (".yaml", ".yml")


def list_examples() -> None:
    """Print every packaged example with its first sentence."""
    columns = ("name", "what it is")
    table = plain_table("Examples; copy one with: dpsweep init --from NAME", columns, words=columns)
    for name, sentence in examples().items():
        table.add_row(name, sentence)
    console().print(table)


def init(
    data: str | None,
    method: str | None,
    example: str | None,
    name: str | None,
    out: Path | None,
    *,
    force: bool,
) -> None:
    """Write a sweep and its base, and print what to type next.

    Raises:
        ConfigError: If options contradict one another, the data cannot be used, or a file is there
            already and `force` is false.
    """
    if name is not None:
        check_name(name, "--name")
    if out is not None:
        _check_out(out)
    if example is None:
        made = new_starter(data or DIGITS, method or _DEFAULT_METHOD, out, name)
    else:
        given = [option for option, value in (("--data", data), ("--method", method)) if value]
        if given:
            raise ConfigError(
                f"{given[0]}: --from copies an example as it is. Leave out {given[0]}, or --from"
            )
        made = copy_example(example, out, name)
    written = _write(made, force=force)
    out_ = console()
    for note in made.notes:
        out_.print(note, markup=False)
    for path in written:
        out_.print(f"wrote {path}", markup=False)
    typed = shlex.quote(str(made.sweep))
    out_.print(f"Next: dpsweep check {typed}\n      dpsweep launch {typed}", markup=False)


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"-o {out}: is a folder. Name the sweep file in it, such as {out}/x.yaml")
    if out.suffix not in _SUFFIXES:
        raise ConfigError(f"-o {out}: a sweep file ends in .yaml. Write -o {out}.yaml")


def _write(made: Starter, *, force: bool) -> list[Path]:
    """Write the files that are not there as they should be; none if one may not be replaced."""
    changed = {
        path: text
        for path, text in made.files.items()
        if not (path.is_file() and path.read_bytes() == text.encode())
    }
    there = [path for path in changed if path.exists() or path.is_symlink()]
    if there and not force:
        raise ConfigError(
            f"{there[0]}: is there already. Write elsewhere with -o FILE, or replace it with "
            f"--force"
        )
    for path, text in changed.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if force else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            raise ConfigError(
                f"{path}: cannot be written ({e.strerror}). Name another place with -o FILE"
            ) from e
    return list(changed)
