"""What is left behind when the trials are through: the best config, and the parent run's story."""

import logging
from pathlib import Path

from dpsweep.config.trial import config_yaml
from dpsweep.core.errors import DpSweepError
from dpsweep.execution.launch import Session
from dpsweep.execution.tracking import STATEMENT, again, void_tags
from dpsweep.results.export import Origin, origin_of, to_yaml, write
from dpsweep.results.figures import can_draw, figures, write_pictures
from dpsweep.results.page import page, write_page
from dpsweep.results.pareto import target_of, winners
from dpsweep.results.ranking import standings, verdict
from dpsweep.search.charge import statement
from dpsweep.search.trial_record import Record
from dpsweep.tracking.tracker import Facts

_WEIGHTS_KEPT = 3

log = logging.getLogger(__name__)


def finish(session: Session, out: Path, *, complete: bool) -> tuple[list[Record], Origin]:
    """Writes the best config, and to the parent run: statement, configs, weights of the best.

    Args:
        session: The sweep; its trials have ended.
        out: Where the best config goes, if there is one.
        complete: False if the sweep was stopped and can go on.

    Returns:
        Complete trials, the best first, and where they come from.
    """
    study, tracker, folder = session.study, session.tracker, session.folder
    study.choose()  # a search that was stopped has not done so
    best, origin = study.best(), origin_of(study)
    compared = standings(study.records(), study.sweep.config.objective.direction)
    words = [*filter(None, [verdict(compared)]), origin.search_words]
    metrics: dict[str, float] = {}
    if best:
        words = [
            f"Best trial ({best[0].number}), by itself: {statement(best[0])}",
            origin.luck(best[0]),
            *words,
        ]
        for record in winners(study):
            for place in (out, folder.path / "best.yaml"):
                write(target_of(record, place), to_yaml(record, 1, origin))
        metrics = {f"best/{k}": v for k, v in (best[0].row or {}).items() if k.startswith("valid/")}
        if repeats := origin.confirmed.get(best[0].number):
            metrics |= {"confirmed/mean": repeats.mean, "confirmed/spread": repeats.spread}
    note = "\n\n".join(words)
    write(folder.path / "privacy.md", note + "\n")
    tags = {"dpsweep.complete": str(complete).lower(), STATEMENT: origin.search_words}
    described = _description(words, study.sweep.name, best)
    tracker.sweep(Facts({}, tags | void_tags(study), described))
    files = [target_of(record, folder.path / "best.yaml") for record in winners(study)]
    for file in (folder.path / "sweep.yaml", *files, folder.path / "privacy.md"):
        tracker.artifact(file)
    for place in _shown(session, best):
        tracker.artifact(place)
    for record in best[:_WEIGHTS_KEPT]:
        tracker.artifact(folder.trial_dir(record.number) / "weights.pt", record.number)
    metrics["trials"] = float(origin.num_trials)
    tracker.sweep_end("FINISHED" if complete else "KILLED", metrics)
    return best, origin


def _description(words: list[str], name: str, best: list[Record]) -> str:
    """The parent run's page in Markdown: statements, the best config, how to go on."""
    parts = [f"**Privacy and result.** {words[0]}", *words[1:]]
    if best:
        parts.append(
            f"**Best config**, trial {best[0].number}. {again(config_yaml(best[0].config))}"
        )
    parts.append(
        f"The artifacts hold `report.html` (all on one page, figures included), `best.yaml`, "
        f"and `sweep.yaml`, which searches again: `dpsweep launch sweep.yaml --name {name}-again`."
    )
    return "\n\n".join(parts)


def _shown(session: Session, best: list[Record]) -> list[Path]:
    """The page and, where they can be drawn, the figures as pictures; what was written of them.

    A sweep's results are never lost for want of a picture.
    """
    if not best:
        return []
    folder, written = session.folder.path, list[Path]()
    try:
        drawn = figures(session.study)
        write_page(folder / "report.html", page(session.study, drawn))
        written.append(folder / "report.html")
        if drawn and can_draw():
            write_pictures(drawn, folder / "figures")
            written.append(folder / "figures")
    except DpSweepError as e:
        log.warning("the report is not complete: %s", e)
    return written
