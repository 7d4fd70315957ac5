"""A URI is never shown with the secret in it."""

import pytest

from dpsweep.track.server import without_password


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host:5000", "http://host:5000"),
        ("http://me:secret@host:5000/x", "http://me:***@host:5000/x"),
        ("postgresql+psycopg://me:se@cret@h/db", "postgresql+psycopg://me:***@h/db"),
        ("postgresql://me@h/db", "postgresql://me@h/db"),
        ("postgresql://:secret@h/db", "postgresql://:***@h/db"),
        ("postgresql://h/db?user=me&password=secret", "postgresql://h/db?user=me&password=***"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("http://[secret", "***"),
    ],
)
def test_the_password_is_not_shown(uri, shown):
    assert without_password(uri) == shown
