"""Make sure that the sources of a run have the same columns, and number classes alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain_plus.data.sources.converted_source import class_names
from raytrain_plus.data.sources.parquet_source import ParquetSource
from raytrain_plus.data.sources.read_types import united
from raytrain_plus.data.sources.source import Source, within
from raytrain_plus.errors import DataError


def alike(seen: Source, held_out: Source, *, older: bool = False) -> tuple[Source, Source]:
    """Return the training and the held-out data with one type for each column.

    `older`: whether a version began the run that did not compare class labels. Raises `DataError` if the held-out data
    has other columns, types that have nothing in common, or other classes.
    """
    schema = united(seen.schema, held_out.schema)
    if schema is not None:
        seen, held_out = seen.read_as(schema), held_out.read_as(schema)
    check_alike(seen, held_out, older=older)
    return seen, held_out


def check_alike(seen: Source, held_out: Source, *, older: bool = False) -> None:
    """Raise `DataError` if the held-out data has other columns than the training data."""
    if not held_out.schema.equals(seen.schema):
        raise DataError(
            f"the held-out data has other columns than the training data: {_other_columns(seen, held_out)}",
            where=f"evaluate.path: {held_out.named}",
            expected=f"the columns of {seen.named}: {', '.join(seen.schema.names)}",
            remedy="name the columns to read, with their types, in data.columns",
        )
    if not older:
        check_labels(seen, held_out, f"evaluate.path: {held_out.named}")
    if (mine := class_names(seen)) != (theirs := class_names(held_out)):
        names = sorted({*mine} ^ {*theirs})
        raise DataError(
            f"only one of the training data and the held-out data has images of {', '.join(names[:4])}",
            where=f"evaluate.path: {held_out.named}",
            expected=f"the class folders of {seen.named}: labels number them",
            remedy="put an image of each class into both folders",
        )


def check_labels(seen: Source, other: Source, where: str) -> None:
    """Raise `DataError` if a class label of Hugging Face's has another number in other data, which is at `where`."""
    _check_labels(seen, other.labels, where, than=f"in {seen.named}")


def check_own_labels(data: Source) -> None:
    """Raise `DataError` if a class label of Hugging Face's has another number in another file."""
    for one in within(data, ParquetSource):
        for name, labels in one.relabelled:
            _check_labels(data, labels, f"{one.root}/{name}", than=f"those of other files of {data.named}")


def _check_labels(seen: Source, labels: Mapping[str, Sequence[str]], where: str, *, than: str) -> None:
    for name in seen.labels.keys() & labels.keys() & {*seen.schema.names}:
        mine, theirs = list(seen.labels[name]), list(labels[name])
        if mine != theirs:
            at = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if len({*pair}) > 1), None)
            differ = f"{len(theirs)}, not {len(mine)}" if at is None else f"{at} is '{theirs[at]}', not '{mine[at]}'"
            raise DataError(
                f"the classes of '{name}' have other numbers than {than}: {differ}",
                where=where,
                expected=f"the classes {', '.join(mine[:6])}{', ...' * (len(mine) > 6)}",
                remedy=f"cast it with datasets' cast_column('{name}', ClassLabel(names=[...])), or leave it out of "
                "data.columns",
            )


def _other_columns(seen: Source, held_out: Source) -> str:
    """Name the columns that only one of them has, or those of other types, or say that their order differs."""
    mine, theirs = ({field.name: field.type for field in one.schema} for one in (seen, held_out))
    if names := sorted({*mine} ^ {*theirs}):
        return ", ".join(names)
    types = [f"'{name}' is {kind}, not {mine[name]}" for name, kind in theirs.items() if kind != mine[name]]
    return ", ".join(types) or f"their order is {', '.join(theirs)}"


def check_classes(names: Sequence[str], sources: Sequence[Source]) -> None:
    """Raise `DataError` if two sources of image files number other classes."""
    classes = [(name, found) for name, source in zip(names, sources, strict=True) if (found := class_names(source))]
    for name, found in classes:
        if found != classes[0][1]:
            differing = sorted({*found} ^ {*classes[0][1]})
            raise DataError(
                f"only one of two sources has images of {', '.join(differing[:4])}",
                where=name,
                expected=f"the class folders of {classes[0][0]}: labels number them",
                remedy="put an image of each class into the folders of all sources",
            )
