"""Types of the values in run configs."""

from typing import Annotated

import pydantic
from pydantic import Field

from dtransformer.inputs.json_file import STRICT

# Types of values. Upper bounds keep derived numbers finite; `runs.needs` checks memory.
Count = Annotated[int, Field(ge=1, le=10**9)]
Number = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Pieces = Annotated[int, Field(ge=16, le=10**7)]
Epochs = Annotated[int, Field(ge=1, le=10**6)]
Small = Annotated[int, Field(ge=1, le=1000)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=1, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, lt=0.5)]
Path = Annotated[str, Field(min_length=1, max_length=4095)]
Name = Annotated[str, Field(min_length=1, max_length=100)]

# Decorator of the classes of sections. It validates every assignment.
run_options = pydantic.dataclasses.dataclass(config={**STRICT, "validate_assignment": True})
