#!/bin/sh
# entrypoint.sh COMMAND...: runs it with secrets from files in its environment.
# For each name below, what NAME_FILE names is read into NAME. So a secret is in no argument and in
# no image; whoever prefers it may set NAME itself.
set -eu

for name in RAY_AUTH_TOKEN PGPASSWORD MLFLOW_TRACKING_PASSWORD MLFLOW_AUTH_ADMIN_PASSWORD \
    MLFLOW_FLASK_SERVER_SECRET_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do
    file=$(printenv "${name}_FILE" || true)
    [ -n "$file" ] || continue
    if ! [ -s "$file" ]; then
        echo "error: ${name}_FILE=$file: no such file, or it is empty" >&2
        exit 2
    fi
    export "$name=$(cat "$file")"
    unset "${name}_FILE"
done

exec "$@"
