"""There is one way through a sweep: command line, Python and `reproduce` call one module."""

import ast
from pathlib import Path

import dpsweep
from dpsweep.app.orchestrator import _description

STEPS = {"new_session", "old_session", "finish", "check_services", "cluster_for"}


def names_used(path):
    """Names that a module imports or reads."""
    tree = ast.parse(path.read_text())
    found = {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    return found | {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def test_only_the_orchestrator_goes_from_preflight_to_results():
    root = Path(dpsweep.__file__).parent
    users = {
        str(path.relative_to(root))
        for place in ("api.py", "app", "cli")
        for path in ([root / place] if place.endswith(".py") else (root / place).rglob("*.py"))
        if STEPS & names_used(path)
    }
    assert users == {"app/orchestrator.py"}


def test_command_line_python_and_reproduce_call_it():
    root = Path(dpsweep.__file__).parent
    for module in ("api.py", "cli/verbs/run.py", "cli/verbs/reproduce.py"):
        assert "orchestrator" in names_used(root / module), module


def test_page_of_a_sweep_without_a_result_names_what_is_there():
    said = _description(["No trial was completed."], "tiny", [])
    assert "report.html" not in said
    assert "best.yaml" not in said
    assert "The artifacts hold `sweep.yaml`, which searches again: `dpsweep launch" in said
