-- Run once by the database's image, beside POSTGRES_DB, which holds the studies.
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_auth;
