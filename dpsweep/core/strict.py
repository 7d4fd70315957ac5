"""The base of every config class: what came from a file is checked once and never changes."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


def is_unused(value: object) -> bool:
    """True for an unused value; with `exclude_if`, its key is not written.

    A trial's identity is what is written of it: one that began before a key was there goes on.
    """
    return value is None or value is False


class Strict(BaseModel):
    """Base of every config: no unknown keys, no NaN or infinity, no coercion, no mutation.

    `letters` maps a paper's letter to the field's name, so that a formula can be typed as
    it is printed; the name is what is stored, exported and tracked.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    letters: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _spell_out_letters(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        doubled = [
            letter for letter, name in cls.letters.items() if letter in data and name in data
        ]
        if doubled:
            name = cls.letters[doubled[0]]
            raise ValueError(
                f"gives {name} twice: as {name}: {data[name]} and as {doubled[0]}: "
                f"{data[doubled[0]]}, its letter in the paper. Delete one of the two"
            )
        return {cls.letters.get(key, key): value for key, value in data.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema for editors: with the letters as keys, and unions told apart softly.

        A union's member whose name is left to us would match several classes, which JSON
        schema's oneOf refuses and anyOf takes.
        """
        schema = handler.resolve_ref_schema(handler(core_schema))
        fields = schema.get("properties", {})
        for field in fields.values():
            if "oneOf" in field:
                field["anyOf"] = field.pop("oneOf")
        for letter, name in cls.letters.items():
            fields[letter] = {**fields[name], "title": f"{letter} (paper) = {name}"}
        return schema
