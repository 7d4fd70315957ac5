#!/bin/sh
# tracking.sh: the MLflow server, with basic authentication; one worker and no jobs, 0.5 GB instead of 3.
#   MLFLOW_BACKEND_STORE_URI      such as postgresql+psycopg://USER@HOST/DATABASE; the password is PGPASSWORD
#   MLFLOW_AUTH_CONFIG_PATH       names the database of users
#   MLFLOW_ARTIFACTS_DESTINATION  such as s3://BUCKET; with MLFLOW_S3_ENDPOINT_URL and AWS_* keys
#   MLFLOW_SERVER_ALLOWED_HOSTS   the names it is called by, with commas; others get 403
#   MLFLOW_AUTH_ADMIN_PASSWORD, MLFLOW_FLASK_SERVER_SECRET_KEY
set -eu

for name in MLFLOW_BACKEND_STORE_URI MLFLOW_ARTIFACTS_DESTINATION MLFLOW_SERVER_ALLOWED_HOSTS \
    MLFLOW_AUTH_CONFIG_PATH MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY; do
    if [ -z "$(printenv "$name" || true)" ]; then
        echo "error: $name is not set" >&2
        exit 2
    fi
done

export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
exec mlflow server --app-name basic-auth --host 0.0.0.0 --port "${MLFLOW_PORT:-5000}" \
    --workers "${MLFLOW_WORKERS:-1}" --serve-artifacts
