"""What is left behind when the trials are through: the best config, and the parent run's story."""

from pathlib import Path

from dpsweep.report.export import Origin, origin_of, to_yaml, write
from dpsweep.report.front import target_of, winners
from dpsweep.report.winner import standings, verdict
from dpsweep.track.tracker import Facts
from dpsweep.tune.charge import statement
from dpsweep.tune.launch import Session
from dpsweep.tune.record import Record

_WEIGHTS_KEPT = 3


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
    void = {"privacy": "void"} if study.is_void else {}
    tracker.sweep(Facts({}, {"dpsweep.complete": str(complete).lower(), **void}, note))
    files = [target_of(record, folder.path / "best.yaml") for record in winners(study)]
    for file in (folder.path / "sweep.yaml", *files, folder.path / "privacy.md"):
        tracker.artifact(file)
    for record in best[:_WEIGHTS_KEPT]:
        tracker.artifact(folder.room(record.number) / "weights.pt", record.number)
    metrics["trials"] = float(origin.num_trials)
    tracker.sweep_end("FINISHED" if complete else "KILLED", metrics)
    return best, origin
