"""The base of all settings, be they of files or of commands. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


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
