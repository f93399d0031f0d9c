"""The base of all settings, be they of files or of commands, and kinds of their values. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Libraries take no larger numbers of samples, tries and so on, and nobody means one.
Count = Annotated[int, Field(le=2**31 - 1)]
# The part of its former value that a mean keeps.
Share = Annotated[float, Field(ge=0, lt=1)]
# The name of a file, a folder, or something on the hub. Control characters make Python's functions raise odd errors.
NAME = r"^[^\x00-\x1f\x7f]+$"
Name = Annotated[str, Field(pattern=NAME)]
RUN_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
# Names of peers are shown on other people's screens.
PEER_NAME = r"^[A-Za-z0-9._@+-]*$"


class Settings(BaseModel):
    """Base of all settings: immutable; an unknown key or an infinite number is an error. The texts describe fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Section(Settings):
    """Base of all sections of files, in which a number, a text and a truth are told apart."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text where a number belongs, and the like: pydantic reads "1e-3" as a number, and true as 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, (str, bool)) and type(value) not in kinds and kinds & {int, float, bool}:
            expected = "true or false" if bool in kinds else "a number, with a point and without quotes"
            raise ValueError(f"expected {expected}, not {value!r:.80}")
        return value
