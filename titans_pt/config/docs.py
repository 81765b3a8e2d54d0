"""Documentation of the settings: a JSON schema for editors and a page for readers.

Both are made from the sections in this folder and from the sections of mixers, memory rules and tasks.
``python -m titans_pt.config.docs`` in the root of the repository writes configs/schema.json and docs/settings.md.
Sections inside sections, lists and dicts are found by their types; nothing here knows a section by name.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from titans_pt.config.fields import Section
from titans_pt.config.model import MemoryConfig, ModelConfig
from titans_pt.config.tree import Config
from titans_pt.registry import Registry
from titans_pt.tools.markdown import markdown_table

SCHEMA, PAGE = "configs/schema.json", "docs/settings.md"
_INHERIT = {
    "description": "Files, relative to this one, whose settings it inherits; later files and this one win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_INTRODUCTION = """\
# All settings

`make settings` writes this page from the sections in [titans_pt/config/](../titans_pt/config/tree.py) and the
settings of mixers, memory rules and tasks; do not edit it here.

A YAML file holds them as a tree; `key.path=value` on the command line wins over the file. A setting that is left out
has its default. `inherit: FILE` or `inherit: [FILE, ...]` at the top of a file inherits the settings of other files.

- Numbers, booleans and nulls are YAML 1.2's; a whole number may be written as `1e6`. Where a text is wanted it stays
  what was typed: `run.dir=2026-01-05`, `wandb.name=007`, `wandb.name=no`.
- On the command line a value that begins with `[`, `{` or a quote is YAML; any other is taken as it stands, with its
  `#` and `:`. In a file ` #` begins a comment: put such a text in quotes.
- A key that stands twice in one section is an error. Anchors, aliases and merge keys (`<<`) copy values.
- In paths `~`, `$NAME` and `${NAME}` are expanded. Relative paths count from the folder in which the command is
  started; in the config.yaml of a run's folder, from where the run was started, and its run.dir is the folder that
  holds it.

Editors with a YAML language server (VS Code with the YAML extension, Neovim, JetBrains) complete, explain and check a
file that begins with `# yaml-language-server: $schema=PATH`, where PATH leads from the file to
[configs/schema.json](../configs/schema.json). All files in configs/ do.

`NAME` in a path stands for a key that you choose, `[]` for an entry of a list.
"""


def whole_tree() -> type[Section]:
    """Config with the sections of all mixers, memory rules and tasks as ordinary fields."""
    # Not at the top: they import torch.
    from titans_pt.kernels.memory.rules import RULES
    from titans_pt.models.mixers import MIXERS
    from titans_pt.tasks import TASKS

    memory = _with_sections(MemoryConfig, RULES)
    model = _with_field(_with_sections(ModelConfig, MIXERS), "memory", memory)
    return _with_field(_with_sections(Config, TASKS), "model", model)


def _with_field(section: type[Section], name: str, kind: type[Section]) -> type[Section]:
    """``section`` with the type of its field ``name`` replaced by ``kind``."""
    field = Field(default=kind(), description=section.model_fields[name].description)
    fields: dict[str, Any] = {name: (kind, field)}
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def _with_sections(section: type[Section], registry: Registry) -> type[Section]:
    own = {name: registry.find(name).Settings for name in registry.built_in()}
    fields: dict[str, Any] = {
        name: (settings, Field(default=settings(), description=f"The settings of {name}, if it is used."))
        for name, settings in own.items()
        if settings.model_fields
    }
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)


def json_schema(tree: type[Section] | None = None) -> JsonSchemaValue:
    """JSON schema (draft 2020-12) of a YAML file of settings, with the docs as descriptions.

    Rules about several settings (d_model is a multiple of n_heads) are not part of it; the program checks these.
    ``tree`` is :func:`whole_tree` by default.
    """
    schema = (tree or whole_tree()).model_json_schema(schema_generator=_Generator)
    for section in schema["$defs"].values():
        section.pop("title", None)
    schema["properties"] = {"inherit": _INHERIT} | schema["properties"]
    head = {"$schema": _Generator.schema_dialect, "title": "titans-pt", "description": "Settings of titans-pt."}
    return schema | head


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema) -> bool:
        return False  # a title would be "Max Steps" for max_steps

    def default_schema(self, schema) -> JsonSchemaValue:
        """No default for a section: each of its settings shows its own."""
        value = schema.get("default")
        values = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
        if any(isinstance(value, BaseModel) for value in values):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def settings_page(tree: type[Section] | None = None) -> str:
    """All settings as a Markdown page: path, allowed values, default and meaning."""
    schema = json_schema(tree)
    del schema["properties"]["inherit"]
    parts = [_INTRODUCTION]
    for path, doc, section in _sections(schema, schema["$defs"]):
        rows = [_row(path + name, field) for name, field in section["properties"].items() if "$ref" not in field]
        if path:
            parts.append(f"## {path.rstrip('.')}\n\n{_markdown(doc)}\n")
        if rows:
            parts.append(markdown_table(("setting", "allowed", "default", "meaning"), rows) + "\n")
    return "\n".join(parts)


def _sections(schema: dict, known: dict, path: str = "", doc: str = "") -> Iterator[tuple[str, str, dict]]:
    """(path and dot, doc, schema) of a section and all sections inside; ``[]``: any entry, ``NAME``: any key."""
    yield path, doc, schema
    for name, field in schema["properties"].items():
        for suffix, section in _inside(field, known):
            doc = field.get("description") or section.get("description", "")
            yield from _sections(section, known, f"{path}{name}{suffix}.", doc)


def _inside(field: dict, known: dict) -> Iterator[tuple[str, dict]]:
    """The sections that a field holds: (suffix to the field's path, schema)."""
    if "$ref" in field:
        yield "", known[field["$ref"].rpartition("/")[2]]
    for alternative in field.get("anyOf", []):
        yield from _inside(alternative, known)
    for key, step in (("items", "[]"), ("additionalProperties", ".NAME")):
        if isinstance(field.get(key), dict):
            yield from ((step + suffix, section) for suffix, section in _inside(field[key], known))


def _row(path: str, field: dict) -> tuple[str, ...]:
    default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
    return f"`{path}`", _allowed(field), default, _markdown(field.get("description", ""))


def _allowed(field: dict) -> str:
    """The allowed values of a field, in words."""
    if "$ref" in field:
        return "section"
    if "anyOf" in field:
        return " or ".join(map(_allowed, field["anyOf"]))
    if values := field.get("enum", [field["const"]] if "const" in field else None):
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in values)
    kind = field.get("type", "anything")
    if kind == "array":
        least, most = field.get("minItems", 0), field.get("maxItems")
        which = f"list of {least}" if least == most else "non-empty list" if least else "list"
        return f"{which}: {_allowed(field['items'])}"
    if kind == "object":
        return f"mapping, NAME: {_allowed(field['additionalProperties'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    name = {"boolean": "`true`, `false`", "null": "`null`"}.get(kind, kind)
    return " ".join([name, ", ".join(bounds)]).strip()


def _markdown(doc: str) -> str:
    """A docstring as one line of a table."""
    return " ".join(doc.split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    Path(SCHEMA).write_text(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    Path(PAGE).write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
