"""A URI is never shown with the secret in it."""

import pytest
from sqlalchemy import make_url

from dpsweep.tracking.server import redact_password


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
        ("sqlite:////a/me@work/b:c@d.db", "sqlite:////a/me@work/b:c@d.db"),
        ("sqlite:///C:/me@work/b.db", "sqlite:///C:/me@work/b.db"),
        ("postgresql//me:secret@h/db", "postgresql//me:***@h/db"),  # mistyped, and shown as such
        ("me:secret@h/db", "me:***@h/db"),
        ("postgresql://h/db?sslkey=client.key", "postgresql://h/db?sslkey=client.key"),
        ("postgresql://h/db?api_key=secret&a=b", "postgresql://h/db?api_key=***&a=b"),
    ],
)
def test_the_password_is_not_shown(uri, shown):
    assert redact_password(uri) == shown


WORDS = ["se/cret", "se#cret", "se?cret", "se:cret", "se%40cret", "se&x=cret", "se?a=b/cret"]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("user", ["me", "", "me@work", "m?e"])
@pytest.mark.parametrize("rest", ["h:5432/db", "/db", "h/db?a=b@c"])
def test_what_sqlalchemy_takes_for_a_password_is_not_shown(word, user, rest):
    uri = f"postgresql+psycopg://{user}:{word}@{rest}"
    shown, password = redact_password(uri), make_url(uri).password
    assert password
    assert password not in shown
    assert word not in shown
    assert shown.startswith(f"postgresql+psycopg://{user}:***@")


@pytest.mark.parametrize(
    "key",
    ["password", "sslpassword", "PWD", "api_key", "access_token", "pass%77ord"],
)
@pytest.mark.parametrize("value", ["sesame", "se/same", "se?same", "se:sa@me", "se=same"])
def test_a_secret_among_the_settings_is_not_shown(key, value):
    uri = f"postgresql://me@h/db?connect_timeout=3&{key}={value}"
    assert value not in redact_password(uri)
    assert "same" not in redact_password(uri).replace("h/db", "")
