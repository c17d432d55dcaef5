"""Sections of a config: each component declares its own, and registries say which one a file asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast, final

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

from mixwell.utils.registry import Registry

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Whole = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]


class ConfigSection(BaseModel):
    """A part of a config: unknown keys are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


AnySection = TypeVar("AnySection", bound=ConfigSection)


class Choice(ABC, Generic[AnySection]):
    """An annotation of a field: the value decides which section of a registry validates it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.validate, handler(source))

    def validate(self, given: Any) -> Any:
        """Return the section for a mapping; other values are left to the annotated type."""
        given = self.complete(given)
        if not isinstance(given, Mapping):
            return given
        return self.section(cast("Mapping[str, Any]", given)).model_validate(given)

    def complete(self, given: Any) -> Any:
        """Return the full form of a value, where there is a short one."""
        return given

    @abstractmethod
    def section(self, given: Mapping[str, Any]) -> type[AnySection]:
        """Return the section that validates a value; raise ``ValueError`` where there is none."""


@final
@dataclass(frozen=True)
class ByKind(Choice[AnySection]):
    """The section that the key ``kind`` names, by default that of ``default``."""

    registry: Registry[type[AnySection]]
    default: str

    @override
    def complete(self, given: Any) -> Any:
        if isinstance(given, Mapping):
            return {"kind": self.default, **cast("Mapping[str, Any]", given)}
        return given

    @override
    def section(self, given: Mapping[str, Any]) -> type[AnySection]:
        return self.registry.get(given.get("kind", self.default))


@final
@dataclass(frozen=True)
class ByKey(Choice[AnySection]):
    """The section of the only key that is the name of one; it has a field of the same name.

    Args:
        registry: sections by their key.
        short: the key of a value that is a string or a list.
    """

    registry: Registry[type[AnySection]]
    short: str

    @override
    def complete(self, given: Any) -> Any:
        return {self.short: given} if isinstance(given, str | list) else given

    @override
    def section(self, given: Mapping[str, Any]) -> type[AnySection]:
        names = sorted(self.registry.names())
        found = [name for name in names if given.get(name) is not None]
        if len(found) != 1:
            raise ValueError(f"give exactly one of {', '.join(names)}; got {', '.join(found) or 'none'}")
        return self.registry.get(found[0])


@final
@dataclass(frozen=True)
class ByName(Generic[AnySection]):
    """An annotation of a dictionary of sections by name; ``true`` is a section of defaults, ``false`` is none."""

    registry: Registry[type[AnySection]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        each = core_schema.no_info_plain_validator_function(self._validate_one)
        inner = core_schema.dict_schema(core_schema.str_schema(), each)
        return core_schema.no_info_before_validator_function(self._with_names, inner)

    def _with_names(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        plain = cast("Mapping[str, Any]", given)
        return {name: (name, one) for name, one in plain.items() if one is not None and one is not False}

    def _validate_one(self, given: tuple[str, Any]) -> AnySection:
        name, options = given
        section = self.registry.get(name)
        if options is True:
            options = {}
        if not isinstance(options, Mapping | ConfigSection):
            raise ValueError(f"give true, false, or settings by name, got {options!r}")
        return section.model_validate(options)
