"""Data sets as they are declared, and how they are read."""

from typing import Annotated

from pydantic import Field, TypeAdapter

from dpsweep.data.datasets import ImageData
from dpsweep.data.own import OwnData
from dpsweep.data.tables import TableData
from dpsweep.data.text import GenerationData, TextData

DataConfig = Annotated[
    ImageData | TableData | TextData | GenerationData | OwnData, Field(discriminator="name")
]
"""Any data set, told apart by `name`."""


def validate_data(section: object) -> DataConfig:
    """Validate the `data` section of a trial config; ValueError if it is not valid."""
    found: DataConfig = _ADAPTER.validate_python(section)
    return found


_ADAPTER: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
