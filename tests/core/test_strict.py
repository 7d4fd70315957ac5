"""Configs take what they declare, spelled by name or by letter, and never change."""

import math
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from dpsweep.core.strict import Strict


class Inner(Strict):
    """A config inside a config."""

    letters: ClassVar[dict[str, str]] = {"C": "clip_norm"}

    clip_norm: float = 1.0
    """L2 bound."""


class Outer(Strict):
    """A config with a letter, a whole number and a config inside."""

    letters: ClassVar[dict[str, str]] = {"rho": "depth"}

    depth: float = Field(default=0.5, ge=0)
    """Share taken away."""

    count: int = 3
    """How many."""

    inner: Inner = Inner()
    """What is inside."""


def test_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="dpeth\n  Extra inputs are not permitted"):
        Outer(dpeth=0.3)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(number):
    with pytest.raises(ValidationError, match="depth\n  Input should be "):
        Outer(depth=number)


@pytest.mark.parametrize(
    "wrong", [{"depth": "0.3"}, {"count": 3.0}, {"count": "3"}, {"depth": True}, {"count": True}]
)
def test_values_of_another_type_are_refused_and_not_converted(wrong):
    (key,) = wrong
    with pytest.raises(ValidationError, match=f"{key}\n  Input should be a valid"):
        Outer(**wrong)


def test_whole_number_serves_where_a_fraction_may_stand():
    assert Outer(depth=1).depth == 1.0


def test_letter_is_another_spelling_of_the_name():
    assert Outer(rho=0.3) == Outer(depth=0.3)
    assert Outer(inner={"C": 2.0}) == Outer(inner={"clip_norm": 2.0})


def test_name_is_what_is_stored_and_exported():
    assert Outer(rho=0.3).model_dump() == {"depth": 0.3, "count": 3, "inner": {"clip_norm": 1.0}}


def test_letter_and_name_together_are_refused_with_both_values():
    with pytest.raises(
        ValidationError, match=r"gives depth twice: as depth: 0\.3 and as rho: 0\.4, its letter"
    ):
        Outer(depth=0.3, rho=0.4)


def test_letter_is_held_to_the_range_of_its_name():
    with pytest.raises(ValidationError, match="depth\n  Input should be greater than or equal"):
        Outer(rho=-0.1)


def test_config_never_changes():
    config = Outer()
    with pytest.raises(ValidationError, match="Instance is frozen"):
        config.depth = 0.9
    assert hash(config) == hash(Outer())


def test_export_reads_back_equal():
    config = Outer(rho=0.25, count=7, inner={"C": 2.0})
    assert Outer.model_validate(config.model_dump()) == config
    assert Outer.model_validate_json(config.model_dump_json()) == config


def test_schema_tells_editors_names_letters_and_help():
    fields = Outer.model_json_schema()["properties"]
    assert set(fields) == {"depth", "rho", "count", "inner"}
    assert fields["depth"]["description"] == "Share taken away."
    assert fields["rho"]["title"] == "rho (paper) = depth"
    assert fields["rho"]["minimum"] == fields["depth"]["minimum"] == 0


def test_something_that_is_no_mapping_is_refused_in_words():
    with pytest.raises(ValidationError, match="Input should be a valid dictionary"):
        Outer.model_validate(3)
