"""Trial configs as YAML files that load back equal, with where they come from on top."""

import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from dpsweep.config.trial import dump_trial
from dpsweep.core.errors import StateError
from dpsweep.execution.tracking import collect_provenance
from dpsweep.results.best_trials import choice_words
from dpsweep.results.disclosure import Disclosure, disclosure_of
from dpsweep.results.edges import edge_warnings, warn_of_worse_final
from dpsweep.results.tables import format_cell
from dpsweep.search.charge import describe_trial_privacy
from dpsweep.search.confirmation import Confirmation, final_of
from dpsweep.search.trial_record import Record
from dpsweep.store.statement import describe_search_privacy
from dpsweep.store.study import Study

_MARK = "# dpsweep export"
_HEAD_CHARS = 1000
"""Characters of a page in which its mark stands."""

_AGAIN = "train it again with: dpsweep train THIS_FILE"


@dataclass(frozen=True)
class Origin:
    """Origin of an exported config: sweep, study and privacy."""

    sweep: str  # name of the sweep
    metric: str  # what the trials were judged by
    num_trials: int  # how many the search had
    search_words: str  # what the search as a whole has spent
    confirmed: dict[int, Confirmation]  # what repeating the best configs came to, by trial
    disclosure: Disclosure  # what may be told of it
    confirming: bool  # True if the best config was to be repeated
    exploring: bool  # True if a final run was to be trained
    choice: dict[float | None, str]  # how the best config of each epsilon was chosen
    # what to search next, by trial; empty where nothing speaks for other values
    edges: dict[int, str] = field(default_factory=dict)

    def describe_selection_bias(self, record: Record) -> str:
        """Say how large the selection bias of one of its trials is, and how it was chosen."""
        more = self.choice.get(record.epsilon), self.edges.get(record.number)
        return " ".join(filter(None, [self._describe_chance(record), *more]))

    def _describe_chance(self, record: Record) -> str:
        metric = self.metric
        if record.final:
            return (
                f"{metric} is that of the final run, trained once at the config that "
                f"{self.num_trials} exploring trials chose: the choice did not see it."
            )
        if self.exploring:
            return (
                f"{metric} is that of an exploring trial, which has much noise: the final run did "
                f"not come to a result (yet)."
            )
        if repeats := self.confirmed.get(record.number):
            what = "mean ± standard deviation; " if len(repeats.values) > 1 else ""
            return (
                f"Confirmed with fresh noise: {metric} {repeats} ({what}"
                f"{format_cell(record.value)} when it was chosen)."
            )
        if self.confirming:
            return f"{metric} is that of one run: no repeat of this config came to a result."
        return self.disclosure.describe_chance(record, metric, self.num_trials)


def origin_of(study: Study) -> Origin:
    """Get the origin of a study's exports, and what the search has spent so far."""
    records = study.records()
    edges = {r.number: " ".join(f"{x}." for x in edge_warnings(study.sweep, r)) for r in records}
    if final := final_of(records):
        worse = warn_of_worse_final(final, records, study.sweep.config.objective)
        edges[final.number] = " ".join(filter(None, (edges[final.number], worse)))
    return Origin(
        sweep=study.sweep.name,
        metric=study.sweep.config.objective.metric,
        num_trials=sum(record.confirms is None for record in records),
        search_words=describe_search_privacy(study),
        confirmed=study.confirmed(),
        disclosure=disclosure_of(study.sweep),
        confirming=study.sweep.config.confirm is not None,
        exploring=study.sweep.explores,
        choice=choice_words(study),
        edges=edges,
    )


def to_yaml(record: Record, rank: int, origin: Origin) -> str:
    """The file's text: comments that the loader ignores, then the config."""
    return f"{header(record, rank, origin, _AGAIN)}\n{dump_trial(record.config)}"


def header(record: Record, rank: int, origin: Origin, how: str) -> str:
    """Make the comments on top of an export: its origin and its privacy statement."""
    return "\n".join(
        textwrap.fill(fact, 98, initial_indent="# ", subsequent_indent="#   ")
        for fact in export_facts(record, rank, origin, how)
    )


def export_facts(record: Record, rank: int, origin: Origin, how: str) -> list[str]:
    """List the facts that every export begins with, a sentence or more each."""
    row = record.row or {}
    versions = ", ".join(
        f"{k.removeprefix('version.')} {v}" for k, v in collect_provenance().items()
    )
    place = f"number {rank} of {origin.num_trials} by {origin.metric}"
    if record.final:
        place = f"the final run, at the config of trial {record.confirms}"
    return [
        f"{_MARK.removeprefix('# ')}: trial {record.number} of sweep {origin.sweep}, {place}",
        f"{origin.metric}: {record.value} at epoch {row.get('epoch')}",
        origin.describe_selection_bias(record),
        f"privacy of this run by itself: {describe_trial_privacy(record)}",
        f"privacy of the search: {origin.search_words}",
        f"accountant: PLD (dp-accounting), noise_multiplier {row.get('noise_multiplier')}, "
        f"epsilon spent {row.get('privacy/epsilon_spent')}",
        f"versions: {versions}",
        how,
    ]


def default_target(sweep: str) -> Path:
    """best.yaml, or best-SWEEP.yaml where that holds the best of another sweep."""
    place = Path("best.yaml")
    taken = [place, *Path().glob("best-epsilon-*.yaml")]
    if any(p.exists() and f"of sweep {sweep}," not in _first_fact(p) for p in taken):
        return Path(f"best-{sweep}.yaml")
    return place


def _first_fact(place: Path) -> str:
    """The header's first two lines as one: they may be wrapped anywhere."""
    lines = place.read_text(errors="replace").splitlines()[:2]
    return " ".join(" ".join(line.lstrip("# ").split()) for line in lines)


def check_target(path: Path, kind: str = "export", mark: str = _MARK) -> None:
    """Raise StateError if writing to `path` would fail, or replace what has no `mark` of ours."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:  # to write there: what a mode allows, a read-only file system may not
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise _make_write_error(path, e) from e
    if path.is_dir():
        such = path / ("best.yaml" if kind == "export" else f"{kind}.html")
        raise StateError(f"-o {path}: is a folder. Name a file, such as -o {such}")
    if path.exists():
        with path.open(errors="replace") as file:  # a report has megabytes
            head = file.read(_HEAD_CHARS if kind == "report" else len(_MARK))
        if mark not in head:
            raise StateError(
                f"-o {path}: exists and is not one of our {kind}s; it is left alone. Name another "
                f"file with -o FILE"
            )


def write(path: Path, text: str) -> None:
    """Write an export; `check_target` has passed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise _make_write_error(path, e) from e


def _make_write_error(path: Path, e: OSError) -> StateError:
    return StateError(f"-o {path}: cannot be written: {e.strerror}. Name another place with -o")
