"""JSON Schema (2020-12) of records and settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

_NONFINITE = ["NaN", "Infinity", "-Infinity"]


class _RecordSchema(GenerateJsonSchema):
    """A schema generator for records, in which NaN and infinite numbers are strings."""

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        """Return the schema of a number or such a string."""
        return {"anyOf": [super().float_schema(schema), {"enum": _NONFINITE}]}


def record_schema(record: type[BaseModel], *, title: str) -> dict[str, Any]:
    """Return the schema of a record's JSON."""
    return _titled(record.model_json_schema(schema_generator=_RecordSchema), title)


def settings_schema(
    settings: type[BaseModel], *, title: str, section: str | None = None
) -> dict[str, Any]:
    """Return the schema of a YAML file of settings.

    section: a key below which the file may have the settings. All settings there have defaults."""
    schema = settings.model_json_schema()
    if section is None:
        return _titled(schema, title)
    definitions = schema.pop("$defs", {})
    name = settings.__name__
    definition = schema if "properties" in schema else definitions.pop(name)
    definition.pop("required", None)
    ref = {"$ref": f"#/$defs/{name}"}
    return _titled(
        {
            "type": "object",
            "if": {"required": [section]},
            "then": {"properties": {section: ref}},
            "else": ref,
            "$defs": {name: definition, **definitions},
        },
        title,
    )


def _titled(schema: dict[str, Any], title: str) -> dict[str, Any]:
    schema.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}
