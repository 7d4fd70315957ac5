"""The report of a sweep as one page that stands alone: no server, no network, no second file.

Everything that names, reasons and values can hold is escaped: by jinja2 in the page, and in the
figures' data by writing < as its JSON escape.
"""

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.table import Table
from rich.text import Text

from dpsweep.config.keys import EPSILON
from dpsweep.config.source import dump_sweep
from dpsweep.core.errors import StateError
from dpsweep.execution.tracking import collect_provenance
from dpsweep.privacy.statement import NO_EPSILON, format_delta, format_epsilon
from dpsweep.results.best_trials import (
    choose_trials,
    list_best_by_budget,
    make_no_result_error,
    make_summary_tables,
)
from dpsweep.results.compare import Comparison, compare_methods
from dpsweep.results.comparison import comparison_table, sentences
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.export import Origin, origin_of, to_yaml
from dpsweep.results.figures import TITLES, caption_of, figures
from dpsweep.results.live import LiveView
from dpsweep.results.plots.outcome import confirmed_groups
from dpsweep.results.plots.style import goal_title
from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import format_budgets, trial_table
from dpsweep.search.charge import describe_trial_privacy
from dpsweep.search.trial_record import Record
from dpsweep.store.statement import format_headline
from dpsweep.store.study import Study

_BEST, _MOST_ROWS, _MOST_REASONS = 10, 500, 20
_HEIGHT = 420
_TEMPLATES = Environment(
    loader=PackageLoader("dpsweep.results", "."), autoescape=True, undefined=StrictUndefined
)
_Grid = dict[str, Any]
"""A table as the page has it: its title, columns (name, left if words), rows and legend."""


def page(
    study: Study, drawn: dict[str, go.Figure] | None = None, *, with_library: bool = True
) -> str:
    """The whole page as HTML.

    Args:
        study: The search; it may still run.
        drawn: Its figures, if they are made already.
        with_library: False to leave out the figures' library, 5 MB, where it is there already.

    Raises:
        StateError: If no trial is complete yet; of a private selection, before its end.
    """
    best = study.best()
    if not best:
        raise make_no_result_error(study)
    drawn = figures(study) if drawn is None else drawn
    origin, records = origin_of(study), study.records()
    compared = compare_methods(study)
    disclosure = disclosure_of(study.sweep)
    best_table = trial_table(choose_trials(study, _BEST), "Best trials", show_state=False)
    tables = [best_table, *make_summary_tables(study)]
    return _render(
        "page.html",
        name=study.sweep.name,
        kind="report",
        state=_state(study),
        subject=_subject(study),
        void=study.is_void,
        statement_of_trial=f"Trial {best[0].number}: {describe_trial_privacy(best[0])}",
        runs_statement=origin.search_words,
        facts=_facts(study, best[0], origin),
        selection_bias=origin.describe_selection_bias(best[0]),
        comparison=sentences(compared) if compared else [],
        configs=[_config(record, origin) for record in list_best_by_budget(study)],
        tables=[*map(_grid, [*tables, *([comparison_table(compared)] if compared else [])])],
        folded=_fold_trials(records) if disclosure.tells_trials else [],
        figures=[_figure(name, one) for name, one in drawn.items()],
        no_figures="" if drawn else disclosure.no_figures,
        commands=_commands(study),
        sweep_file=dump_sweep(study.sweep.file, study.sweep.base.tree),
        provenance=_provenance(study),
        with_library=with_library and bool(drawn),
    )


def live_page(name: str) -> str:
    """The page that `watch --web` serves: it asks for `now` and `report` beside it."""
    return _render("live.html", name=name, kind="live", figures=[], with_library=True)


def live_panel(view: LiveView, links: Mapping[str, str]) -> str:
    """The live view of a sweep as a part of that page, with addresses of other pages by name."""
    bar = view.bar()
    panel = {
        "summary": view.summary(),
        "driver": str(view.driver or ""),
        "completed": bar.completed,
        "total": bar.total,
        "tables": [_grid(table) for table in view.tables() if table.row_count],
        "links": links,
    }
    return _TEMPLATES.get_template("panel.html").render(panel=panel)


def comparison_page(comparison: Comparison, command: str) -> str:
    """A comparison as a page that stands alone; `command` wrote it."""
    names = dict.fromkeys(group.sweep for group in comparison.groups)
    caption = (
        "Filled: mean of fresh runs of the best config, with its 95 % interval if there are "
        "several. Hollow: the chosen run itself, which chance has helped."
    )
    figure = {**_figure_data(confirmed_groups(comparison)), "name": "groups", "caption": caption}
    return _render(
        "compare.html",
        name=" and ".join(names),
        kind="comparison",
        table=_grid(comparison_table(comparison)),
        sentences=sentences(comparison),
        figures=[{**figure, "title": "Side by side"}],
        command=command,
        with_library=True,
    )


def _render(template: str, **page: Any) -> str:
    """A page of this package's, with what all of them need."""
    page["version"] = collect_provenance()["dpsweep.version"]
    page["plotly"] = Markup(get_plotlyjs()) if page["with_library"] else ""
    return _TEMPLATES.get_template(template).render(page=page)


def write_page(path: Path, text: str) -> None:
    """Write a page to a file; StateError if it cannot be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StateError(
            f"-o {path}: cannot be written: {e.strerror}. Name another file with -o FILE"
        ) from e


def _grid(table: Table) -> _Grid:
    """A table that was made to be printed."""
    return {
        "title": str(table.title or ""),
        "columns": [{"name": str(c.header), "left": c.justify == "left"} for c in table.columns],
        "rows": list(zip(*(map(str, c.cells) for c in table.columns), strict=True)),
        "legend": str(table.caption or ""),
    }


def _state(study: Study) -> str:
    """That it is not through, if it is not."""
    if study.is_finished():
        return ""
    ended = sum(r.state != "running" for r in study.records())
    return f"not finished: {ended} of {study.sweep.num_runs} runs so far"


def _subject(study: Study) -> str:
    """Describe the objective and the method, in a sentence."""
    trial, config = study.sweep.written, study.sweep.config
    methods = list(dict.fromkeys(r.config.method.name for r in study.records()))
    method = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    budget = NO_EPSILON if study.is_void else format_budgets(study.sweep.epsilons)
    goals = " and ".join(goal_title(goal).partition(" (")[0] for goal in config.objective.goals)
    return (
        f"{trial.model.name} on {trial.data.name}, trained with {method} at ε {budget} "
        f"(δ {format_delta(trial.delta)}) a {trial.privacy.scope}; searched for {goals} by "
        f"{config.sampler.name}."
    )


def _facts(study: Study, best: Record, origin: Origin) -> list[dict[str, str]]:
    """The figures that are read first, each with what it is."""
    goal = goal_title(origin.metric).partition(" (")[0]
    repeats = origin.confirmed.get(best.number)
    if repeats:
        figure = f"{repeats.mean:.4f} ± {repeats.spread:.4f}"
        words = f"{goal}, mean ± s.d. of {len(repeats.values)} fresh runs"
    else:
        run = "final run" if best.final else "best trial, run once"
        figure, words = f"{best.value:.4f}", f"{goal} of the {run}"
    config = best.config
    spent = math.inf if best.row is None else best.row["privacy/epsilon_spent"]
    # of a final run the noise is given, and not the epsilon
    given = config.privacy.epsilon
    epsilon = f"{given:g}" if given else format_epsilon(spent)
    if study.is_void:
        epsilon = NO_EPSILON
    facts = [(figure, words)]
    facts.append((f"ε = {epsilon}", f"trial {best.number} alone, δ = {format_delta(config.delta)}"))
    whole, delta = format_headline(study)
    facts.append((f"ε = {whole}", f"the whole search, δ = {delta}"))
    facts.append((config.method.name, f"method of the best, trial {best.number}"))
    if disclosure_of(study.sweep).tells_trials:
        repeated = sum(r.confirms is not None for r in study.records())
        more = f", and {repeated} repeats" if repeated else ""
        more = ", and the final run" if repeated and study.sweep.explores else more
        facts.append((str(origin.num_trials), f"trials in the search{more}"))
    return [{"figure": figure, "words": words} for figure, words in facts]


def _config(record: Record, origin: Origin) -> dict[str, str]:
    epsilon = record.hyperparams.get(EPSILON)
    title = f"For ε = {epsilon:g}: trial {record.number}" if epsilon is not None else ""
    return {"title": title, "text": to_yaml(record, 1, origin)}


def _fold_trials(records: list[Record]) -> list[_Grid]:
    """Every trial, and why some failed."""
    shown = records[:_MOST_ROWS]
    title = "All runs" if len(shown) == len(records) else f"The first {_MOST_ROWS} runs"
    tables = [trial_table(shown, title)]
    if failed := [r for r in records if r.state == "failed"]:
        title = f"Trials that failed: {len(failed)}"
        reasons = plain_table(title, ("trial", "reason"), words=("reason",))
        for record in failed[:_MOST_REASONS]:
            reasons.add_row(str(record.number), Text(record.reason or "unknown"))
        tables.append(reasons)
    return [*map(_grid, tables)]


def _figure(name: str, figure: go.Figure) -> dict[str, Any]:
    said = {"name": name, "title": TITLES[name], "caption": caption_of(name, figure)}
    return {**said, **_figure_data(figure)}


def _figure_data(figure: go.Figure) -> dict[str, Any]:
    data = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e")
    return {"height": figure.layout.height or _HEIGHT, "data": Markup(data.replace("&", "\\u0026"))}


def _commands(study: Study) -> list[dict[str, str]]:
    name = study.sweep.name
    commands = {
        "Train the best config again, alone and with fresh noise:": "dpsweep train best.yaml",
        "Search again, from the sweep file below saved as sweep.yaml:": (
            f"dpsweep launch sweep.yaml --name {name}-again"
        ),
        "Look at it where it was run:": f"dpsweep best {name}",
    }
    return [{"words": words, "text": text} for words, text in commands.items()]


def _provenance(study: Study) -> dict[str, str]:
    known = {k.removeprefix("version."): v for k, v in collect_provenance().items()}
    commit = known.pop("mlflow.source.git.commit", None)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "sweep": study.sweep.name,
        "page written": now,
        "accountant": "PLD (dp-accounting)",
        **known,
        **({"git commit": commit} if commit else {}),
    }
