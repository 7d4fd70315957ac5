"""What is left behind when the trials are through: the best config, and the parent run's story."""

from pathlib import Path

from dpsweep.report.export import Origin, origin_of, to_yaml, write
from dpsweep.report.winner import standings, verdict
from dpsweep.track.tracker import Facts
from dpsweep.tune.charge import statement
from dpsweep.tune.launch import Session
from dpsweep.tune.study import Record

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
        words.insert(0, f"Best trial ({best[0].number}): {statement(best[0])}")
        text = to_yaml(best[0], 1, origin)
        for place in (out, folder.path / "best.yaml"):
            write(place, text)
        metrics = {f"best/{k}": v for k, v in (best[0].row or {}).items() if k.startswith("valid/")}
    note = "\n\n".join(words)
    write(folder.path / "privacy.md", note + "\n")
    void = {"privacy": "void"} if any(r.void for r in study.records()) else {}
    tracker.sweep(Facts({}, {"dpsweep.complete": str(complete).lower(), **void}, note))
    for name in ("sweep.yaml", "best.yaml", "privacy.md"):
        tracker.artifact(folder.path / name)
    for record in best[:_WEIGHTS_KEPT]:
        tracker.artifact(folder.room(record.number) / "weights.pt", record.number)
    metrics["trials"] = float(origin.num_trials)
    tracker.sweep_end("FINISHED" if complete else "KILLED", metrics)
    return best, origin
