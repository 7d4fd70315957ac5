#!/usr/bin/env bash
# Makes the README's pictures from a real quickstart. Usage, from the repository's root after
# `make quickstart`:  docs/images/record.sh
# Needs tmux, curl, chromium and chromium-driver (Debian), and `.venv/bin/pip install -e '.[browser-test]'`.
set -euo pipefail
here="$PWD/docs/images" bin="$PWD/.venv/bin" work=$(mktemp -d)
trap 'tmux kill-session -t dpsweep-record 2>/dev/null; kill "${server:-}" 2>/dev/null; rm -rf "$work"' EXIT
cp -r sweeps configs "$work" && cd "$work"

svg() { # ANSI text on stdin -> $1
  "$bin/python" -c '
import sys
from rich.console import Console
from rich.text import Text
console = Console(record=True, width=80, file=open("/dev/null", "w"))
console.print(Text.from_ansi(sys.stdin.read().rstrip()))
console.save_svg(sys.argv[1], title="dpsweep launch sweeps/quickstart.yaml")' "$1"
}

tmux new-session -d -s dpsweep-record -x 80 -y 40 "env PATH=$bin:$PATH PS1='\$ ' bash --norc"
sleep 1
tmux send-keys -t dpsweep-record "clear; time dpsweep launch sweeps/quickstart.yaml" Enter
sleep "${LIVE_SECONDS:-38}"
tmux capture-pane -t dpsweep-record -e -p | svg "$here/live.svg"
until tmux capture-pane -t dpsweep-record -p | grep -q '^real'; do sleep 1; done
tmux capture-pane -t dpsweep-record -e -p | svg "$here/end.svg"

"$bin/dpsweep" ui --port 5077 >/dev/null 2>&1 & server=$!
until curl -s -o /dev/null http://127.0.0.1:5077/health; do sleep 1; done
shot() { "$bin/python" "$here/screenshot.py" "$@"; }
runs="http://127.0.0.1:5077/#/experiments/1/runs?viewStateShareKey=dpsweep&workflowType=machine_learning"
shot "$runs" "$here/mlflow-runs.png" 1600x857
shot "$runs&compareRunsMode=CHART" "$here/mlflow-charts.png" 1400x760
"$bin/dpsweep" report quickstart -o report.html
shot "file://$work/report.html" "$here/report.png" 1000x1000
shot "file://$work/report.html" "$here/report-figures.png" 1000x1500 figures
shot "file://$work/report.html" "$here/report-phone.png" 380x800
