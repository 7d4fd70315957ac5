"""A low-pass filter is given in exactly one form, and one that cannot work is a config mistake."""

import re
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from dpsweep.core.errors import InvalidKey
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth, chebyshev, pole_zero
from dpsweep.filters.iir import Iir
from dpsweep.methods.lowpass import LowPass

FORMS: dict[str, tuple[dict[str, Any], Iir]] = {
    "published": ({"published": "a9_b1"}, Iir((-0.9,), (0.1,))),
    "no_filter": ({"published": "none"}, Iir((), (1.0,))),
    "coefficients": ({"coefficients": {"a": [-0.9], "b": [0.1]}}, Iir((-0.9,), (0.1,))),
    "fir": ({"coefficients": {"b": [0.5, 0.5]}}, Iir((), (0.5, 0.5))),
    "whole_numbers": ({"coefficients": {"a": [], "b": [1]}}, Iir((), (1.0,))),
    "butterworth": (
        {"design": {"family": "butterworth", "order": 2, "cutoff": 0.1}},
        Iir(*butterworth(2, 0.1)),
    ),
    "chebyshev": (
        {"design": {"family": "chebyshev", "order": 3, "cutoff": 0.2}},
        Iir(*chebyshev(3, 0.2, 1.0)),
    ),
    "rippled": (
        {"design": {"family": "chebyshev", "order": 3, "cutoff": 0.2, "ripple_db": 0.5}},
        Iir(*chebyshev(3, 0.2, 0.5)),
    ),
    "poles": ({"poles": [{"radius": 0.9, "angle": 0.0}]}, Iir(*pole_zero([(0.9, 0.0)]))),
    "poles_and_zeros": (
        {
            "poles": [{"radius": 0.9}, {"radius": 0.5, "angle": 1.0}],
            "zeros": [{"radius": 1.0, "angle": 3.14159}],
        },
        Iir(*pole_zero([(0.9, 0.0), (0.5, 1.0)], [(1.0, 3.14159)])),
    ),
}
every_form = pytest.mark.parametrize(("given", "filter_"), FORMS.values(), ids=FORMS)


def mistake(given: dict[str, Any]) -> tuple[str, str]:
    """Key and message of the one mistake in `given`."""
    with pytest.raises(ValidationError) as caught:
        LowPass.model_validate(given)
    (error,) = caught.value.errors()
    inner = error["ctx"]["error"]
    place = [*map(str, error["loc"]), *([inner.key] if isinstance(inner, InvalidKey) else [])]
    return ".".join(place), str(inner)


@every_form
def test_each_form_builds_its_filter(given, filter_):
    assert LowPass.model_validate(given).build() == filter_


@every_form
def test_what_is_dumped_reads_back_the_same(given, filter_):
    config = LowPass.model_validate(given)
    dumped = config.model_dump(mode="json", exclude_none=True)
    assert LowPass.model_validate(dumped) == config
    assert LowPass.model_validate_json(config.model_dump_json()) == config
    assert hash(LowPass.model_validate(dumped)) == hash(config)


def test_a_form_dumps_as_it_was_written():
    given = {"coefficients": {"a": [-0.9], "b": [0.15, -0.05]}}
    assert LowPass.model_validate(given).model_dump(mode="json", exclude_none=True) == given


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_every_printed_set_has_its_name_here(name):
    assert LowPass.model_validate({"published": name}).build() == Iir(*COEFFICIENT_SETS[name])


def test_no_other_name_is_promised():
    literal, _ = get_args(LowPass.model_fields["published"].annotation)
    assert get_args(literal) == tuple(COEFFICIENT_SETS)


@pytest.mark.parametrize(
    ("given", "said"), [({}, "nothing is given"), ({"zeros": [{"radius": 1}]}, "zeros are")]
)
def test_without_a_form_all_four_are_shown(given, said):
    key, message = mistake(given)
    assert key == ""
    assert f"needs a filter in one of four forms, but {said}" in message
    for example in (
        "published: a9_b1",
        "coefficients: {a: ",
        "design: {family: ",
        "poles: [{radius:",
    ):
        assert example in message


def test_examples_shown_are_filters():
    _, message = mistake({})
    examples = message.split("Write ")[1].split("; or ")
    for example in examples:
        assert LowPass.model_validate(yaml.safe_load(f"{{{example}}}")).build()
    assert len(examples) == 4


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        (
            {"published": "a9_b1", "design": {"order": 2, "cutoff": 0.1}},
            "design",
            "is a second form of the filter, beside published",
        ),
        ({"published": "a9_b1", "zeros": []}, "zeros", "belong to poles, not to published"),
        (
            {"coefficients": {"a": [-1.1], "b": [0.1]}},
            "coefficients.a",
            r"Iir\.a = \[-1\.1\] is unstable: .* pole at z = 1\.1",
        ),
        ({"coefficients": {"a": [-0.9], "b": [0.2]}}, "coefficients.b", r"Use b = \[0\.1\]"),
        ({"coefficients": {"b": []}}, "coefficients.b", r"Iir\.b is empty"),
        (
            {"coefficients": {"a": [-0.9], "b": [-0.1, 0.2]}},
            "coefficients.b",
            r"c_0 = -0\.1 at step 0",
        ),
        ({"design": {"order": 8, "cutoff": 0.01}}, "design.cutoff", "Lower order to 6"),
        (
            {"design": {"order": 2, "cutoff": 0.1, "ripple_db": 1.0}},
            "design.ripple_db",
            "is 1.0, but a butterworth filter has no ripples. Delete it, or",
        ),
        ({"poles": [{"radius": 1.0}]}, "poles", r"poles\[0\] must have a radius in \[0, 1\)"),
        ({"poles": []}, "poles", "must be 1 to 8, got 0"),
        ({"poles": [{"radius": 0.9999}] * 4}, "poles", "rounding would be"),
        (
            {"poles": [{"radius": 0.9}], "zeros": [{"radius": 1}]},
            "zeros",
            "must keep away from z = 1",
        ),
        (
            {"poles": [{"radius": 0.9}], "zeros": [{"radius": 2}]},
            "zeros",
            "turns the gradient around",
        ),
    ],
)
def test_mistake_names_the_key_to_change(given, key, message):
    place, text = mistake(given)
    assert place == key
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"published": "a9"}, "Input should be 'none', 'a9_b1'"),
        ({"coefficients": {"a": ["-0.9"], "b": [0.1]}}, "valid number"),
        ({"coefficients": {"a": [float("nan")], "b": [0.1]}}, "finite number"),
        ({"coefficients": {"b": 1.0}}, "valid tuple"),
        ({"coefficients": {"a": [-0.9]}}, r"coefficients\.b\n  Field required"),
        ({"design": {"order": 2.0, "cutoff": 0.1}}, "valid integer"),
        ({"design": {"order": 9, "cutoff": 0.1}}, "less than or equal to 8"),
        ({"design": {"order": 2, "cutoff": 1.0}}, "less than 1"),
        ({"design": {"family": "bessel", "order": 2, "cutoff": 0.1}}, "'butterworth' or 'cheb"),
        ({"poles": [{"radius": 0.5, "angle": -1}]}, r"poles\.0\.angle\n.*greater than or equal"),
        ({"poles": [{"radius": 0.5, "angel": 1}]}, "Extra inputs are not permitted"),
        ({"coefs": {}}, "Extra inputs are not permitted"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(given, match):
    with pytest.raises(ValidationError, match=match):
        LowPass.model_validate(given)


def test_schema_for_editors_lists_the_forms():
    properties = LowPass.model_json_schema()["properties"]
    assert set(properties) == {"published", "coefficients", "design", "poles", "zeros"}
    assert all(field["description"] for field in properties.values())
