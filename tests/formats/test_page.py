"""The format page says what the code does: its tables are compared with the code, line by line."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import xxhash

from ftckpt import codec, layout, manifest, values
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import Position

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
STRUCTS: dict[str, Any] = {
    name: kind
    for name, kind in vars(manifest).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not name.startswith("_")
    if kind.__module__ == manifest.__name__
}
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))


def rows(text: str) -> list[list[str]]:
    """The cells of every line of a table, its head left out."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    return [row for row in cells if row[0].startswith(("`", "0", "1", "2", "3")) or row[0].isdigit()]


def named(hint: Any, field: str) -> str:
    """A type as the page spells it."""
    if hint == manifest.Step:
        return "step"
    if hint == manifest.Attempt:
        return "attempt"
    if get_origin(hint) is Literal:
        return "text"
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return named(get_args(hint)[0], field) + "?"
    if get_origin(hint) is tuple:
        return f"[{named(get_args(hint)[0], field)}]" if get_args(hint)[-1] is ... else "[int]"
    if get_origin(hint) is dict:
        return f"{{{named(get_args(hint)[1], field)}}}"
    if hint is bytes:
        return "hash" if field in ("raw", "stored") else "bytes"
    if hint is str and field == "digest":
        return "digest"
    if get_origin(hint) is Annotated:
        return named(get_args(hint)[0], field)
    return {str: "text", int: "int", bool: "bool"}.get(hint) or str(hint.__name__)


def default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return ""
    return f" = {'[]' if value == () else msgspec.json.encode(value).decode()}"


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_of_every_record_is_on_the_page_with_its_type_and_default(name):
    kind = STRUCTS[name]
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    for field in msgspec.structs.fields(kind):
        if field.default_factory is not msgspec.NODEFAULT:
            defaults[field.name] = field.default_factory()

    told = [(row[0], row[1]) for row in rows(SECTIONS[name])]

    assert told == [
        (f"`{field}`", named(hints[field], field) + default(defaults[field]))
        for field in kind.__struct_fields__
    ]
    assert ("A row" in SECTIONS[name]) == kind.__struct_config__.array_like


def test_no_record_is_on_the_page_that_is_not_in_the_code():
    assert set(SECTIONS) == set(STRUCTS)


def test_every_kind_of_key_is_on_the_page():
    at, writer = Position(12, 3), layout.Writer("g0", 1, "ab" * 16)
    spelled = [
        layout.RUN,
        layout.claim_key(3),
        layout.start_key(3),
        layout.pack_key(at, writer, 7),
        layout.fragment_key(at, writer),
        layout.commit_key(at),
        layout.tombstone_key(at),
        layout.pin_key("x"),
        layout.intent_key("x"),
        layout.save_key(at, writer),
        layout.staged_key(at, writer),
    ]
    parts = {
        "attempt": "000003",
        "step": "000000000012",
        "writer": str(writer),
        "sequence": "000007",
        "id": "x",
    }
    told = [row[0].strip("`") for row in rows(PAGE.split("## 2.")[0])]
    filled = [re.sub(r"<(\w+)>", lambda m: parts[m[1]], key) for key in told]

    assert filled[:-2] == spelled
    assert told[-2].startswith(layout.LOG) and told[-1].startswith(layout.PROBES)


def test_every_codec_dtype_and_tag_is_on_the_page():
    chunks = PAGE.split("## 5.")[1].split("**Byte planes**")[0]
    leaves = PAGE.split("## 6.")[1].split("**Names.**")[0]
    packed = PAGE.split("## 7.")[1].split("## 8.")[0]

    assert {int(row[0]): row[1] for row in rows(chunks)} == codec.CODECS
    assert {name: int(size) for name, size in re.findall(r"`(\w+)` \| (\d+)", leaves)} == ITEMSIZE_BYTES
    assert {int(row[0]) for row in rows(packed)} == set(values._BUILD)


def test_every_bound_on_the_page_is_that_of_the_code():
    bounds = dict(
        re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE.split("## 9.")[1].split("* a key")[0], re.MULTILINE)
    )
    numbers = {
        name: eval(bound.replace("^", "**"))
        for name, bound in bounds.items()
        if bound[0].isdigit() and "up" not in bound
    }

    assert numbers == {
        "bytes of a record": manifest.MAX_RECORD_BYTES,
        "raw bytes of a chunk": manifest.MAX_CHUNK_BYTES,
        "bytes of a leaf, empty dimensions counted as 1": manifest.MAX_LEAF_BYTES,
        "bytes of a value leaf": manifest.MAX_VALUE_BYTES,
        "dimensions": manifest.MAX_NDIM,
        "bases of a chunk": codec.MAX_CHAIN,
        "arrays inside one another in a packed value": values.MAX_DEPTH + 2,
    }
    assert f"`{xxhash.xxh3_128_hexdigest(b'')}`" in PAGE
    assert manifest._TRAILER_BYTES == 43 and manifest.SCALE == 1 << 32
