"""The cluster's side of a verb that was typed elsewhere: `python -m dpsweep.cli.verbs.remote_job`.

    there [--owner NAME] [--state FOLDER] -- VERB WORD...

Runs as a Ray job. Passwords come from the cluster's own environment and files, never from the job.
"""

import json
import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from dpsweep.cli import main
from dpsweep.cli.say import error
from dpsweep.cluster.submit import BEGIN, FILES
from dpsweep.store.owner import VARIABLE
from dpsweep.store.state_dir import StateFolder

_MODULE = str(Path(__file__).parents[2] / "__main__.py")


def there(arguments: list[str]) -> None:
    """Run one verb, with what only this side knows added to it."""
    parser = ArgumentParser(prog="dpsweep.cli.verbs.remote_job")
    parser.add_argument("--owner")
    parser.add_argument("--state")
    parser.add_argument("words", nargs="+")
    told = parser.parse_args(arguments)
    print(BEGIN, flush=True)
    if told.owner:
        os.environ[VARIABLE] = told.owner
    state = told.state or os.environ.get("DPSWEEP_STATE", "")
    if not Path(state).is_absolute():
        error(
            f"--state: no absolute state folder was named, and on the cluster DPSWEEP_STATE "
            f"is {state!r}. A job's own folder is deleted with the job. Name one that every node "
            f"sees with --state FOLDER, or set DPSWEEP_STATE where the cluster is started"
        )
        sys.exit(2)
    os.environ["DPSWEEP_STATE"] = state
    _run(told.words)


def _run(words: list[str]) -> None:
    """The verb, as if typed here."""
    verb = words[0]
    if verb in ("launch", "resume"):
        name = words[words.index("--name") + 1] if "--name" in words else words[1]
        best = StateFolder.at(None).root / "best" / f"{name.removesuffix('.submitted.yaml')}.yaml"
        words = [*words, "--address", "auto", "--out", str(best)]
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if verb == "launch" and uri and "--tracking-uri" not in words:
            words += ["--tracking-uri", uri]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            shutil.which("dpsweep") or _MODULE,
            *words,
            *(["--out", folder] if verb == "export" else []),
        ]
        try:
            main()
        finally:
            if verb == "export":
                found = sorted(Path(folder).iterdir())
                print(FILES + json.dumps({p.name: p.read_text() for p in found}), flush=True)


if __name__ == "__main__":
    there(sys.argv[1:])
