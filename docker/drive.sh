#!/bin/sh
# drive.sh FILE NAME [OPTION...]: launches sweep FILE under NAME, or goes on with it if it is there.
# So the same command may run again after whatever ended the last one. On a node of a Ray cluster.
#   DPSWEEP_STATE         state folder, which every node sees    [/state]
#   DPSWEEP_ADDRESS       Ray cluster; empty for an embedded one [auto]
#   DPSWEEP_STORAGE       database of the study, such as postgresql://USER@HOST/DATABASE
#   DPSWEEP_OWNER         whose sweep it is                      [the account]
#   MLFLOW_TRACKING_URI   tracking server, if there is one
# The best config goes to STATE/best/NAME.yaml, for the folder it runs in may not be writable.
# OPTION: of `dpsweep launch`, for the first time alone.
# Exit code: of dpsweep. 75 says that the same command may succeed later; 1 and 2 that it will not.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: drive.sh FILE NAME [OPTION...]" >&2
    exit 2
fi
file=$1 name=$2
shift 2
state=${DPSWEEP_STATE:-/state}
address=${DPSWEEP_ADDRESS-auto}

me=${DPSWEEP_OWNER:-$(id -un 2>/dev/null || echo "uid-$(id -u)")}
mine=$state
if [ -r "$state/owner" ] && [ "$(cat "$state/owner")" != "$me" ]; then # somebody else was first
    mine=$state/owners/$me
fi
best=$mine/best/$name.yaml
if [ -e "$mine/sweeps/$name/sweep.json" ]; then
    # A driver that was killed on another machine holds the sweep for another 30 s.
    set -- resume "$name" --out "$best" --wait 120
else
    set -- launch "$file" --name "$name" --out "$best" ${MLFLOW_TRACKING_URI:+--tracking-uri "$MLFLOW_TRACKING_URI"} "$@"
fi
set -- "$@" --state "$state" ${address:+--address "$address"}
if [ -z "${RAY_JOB_CONFIG_JSON_ENV_VAR-}" ]; then
    exec dpsweep "$@" # so that signals reach it
fi
# The entrypoint of a Ray job. KubeRay makes another cluster for one that failed, and none for one that
# was stopped: so a job stops itself where another cluster would end the same way.
code=0
dpsweep "$@" || code=$?
case $code in
1 | 2)
    echo "error: exit code $code: another try would end the same way, so this Ray job stops itself" >&2
    job=$(python -c 'import json, os
print(json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"])')
    ray job stop --no-wait "$job" > /dev/null && sleep 60 # it is ended meanwhile
    ;;
esac
exit "$code"
