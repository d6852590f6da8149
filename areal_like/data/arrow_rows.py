"""Rows of Arrow tables, as Parquet files and the datasets library have them, without the keys of other rows.

A struct column has the union of all rows' keys, with null where a row has no such key. Arrow does not distinguish such
a key from a null of the author's, so every null within a struct is left out. JSON text, also in columns of the type
JSON, keeps its nulls.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow import DataType, Schema, Table

type Clean = Callable[[Any], Any]


def rows_of_table(table: "Table") -> list[dict[str, Any]]:
    """Return the rows of a table; raises KeyError for a map with two equal keys."""
    return without_nulls(table.to_pylist(maps_as_pydicts="strict"), table.schema)


def without_nulls(
    rows: Iterable[Mapping[str, Any]], schema: "Schema", *, decoded: bool = False
) -> list[dict[str, Any]]:
    """Return rows of a schema without the nulls in their columns; a column itself stays. JSON columns are parsed.

    The datasets library has parsed `decoded` rows.
    """
    cleans = {field.name: clean for field in schema if (clean := _clean(field.type, decoded))}
    return [{name: cleans[name](value) if name in cleans else value for name, value in row.items()} for row in rows]


def _clean(kind: "DataType", decoded: bool) -> Clean | None:
    """Return the function that leaves out the nulls of values of a type; None for a type without structs."""
    from pyarrow import JsonType, types

    if isinstance(kind, JsonType):
        return None if decoded else lambda value: value if value is None else json.loads(value)
    if types.is_dictionary(kind):
        return _clean(kind.value_type, decoded)
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return _of_struct({field.name: clean for field in fields if (clean := _clean(field.type, decoded))})
    if types.is_map(kind):
        return _of_map(clean) if (clean := _clean(kind.item_type, decoded)) else None
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # the types of lists
        return _of_list(clean) if (clean := _clean(kind.value_type, decoded)) else None
    return None


def _of_struct(cleans: Mapping[str, Clean]) -> Clean:
    def clean(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kept = ((name, each) for name, each in value.items() if each is not None)
        return {name: cleans[name](each) if name in cleans else each for name, each in kept}

    return clean


def _of_map(item: Clean) -> Clean:
    return lambda value: {name: item(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _of_list(item: Clean) -> Clean:
    return lambda value: [item(each) for each in value] if isinstance(value, list) else value
