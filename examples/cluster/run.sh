#!/usr/bin/env bash
# A cluster of two Ray nodes on this machine, and a sweep that is submitted to it. In this folder:
#   ./run.sh
# Needs: pip install 'dpsweep[local]'. On a real cluster, `up` and `down` go, and --to names its head.
set -euo pipefail
dpsweep up --local --nodes 2
trap 'dpsweep down' EXIT
source .dpsweep/local/env
dpsweep submit sweep.yaml
dpsweep status cluster-example
dpsweep export cluster-example -o best
