"""What a user wrote is shown as it is, in brackets too: rich reads those as its own tags."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dpsweep.results.tables import running_table, trial_table


@pytest.mark.parametrize("hyperparams", [1, 8])
def test_a_searched_value_in_brackets_is_shown(study_of, hyperparams):
    record = study_of([0.5]).record(0)
    record = replace(
        record, hyperparams={f"model.arguments.act{i}": "[relu]" for i in range(hyperparams)}
    )
    for table in (running_table([record]), trial_table([record], "Best trials")):
        out = io.StringIO()
        Console(file=out, width=300).print(table)
        assert out.getvalue().count("[relu]") == hyperparams
