"""States that a worker holds in rows: names of rows, and the parts of several workers put together. Pure.

Where the optimizer's state is sharded, a worker changes some rows of each weight. Rows [3, 7) of the weight `w` are the
parameter `w[3:7]`; its optimizer's state is `optim/w[3:7]/<key>`, its average `ema/w[3:7]`. All rows of a weight have
its plain name. Values without dimensions, such as a step count, belong to each row alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.membership.pieces import Piece, Pieces

Packed = tuple[str, tuple[int, ...], npt.NDArray[Any]]
"""A tensor's dtype (its torch name), shape and bytes."""
Tree = Any
"""See `state.holding`."""

_ROWS = re.compile(r"(.*)\[([0-9]+):([0-9]+)\]", re.DOTALL)
_TENSOR = re.compile(r"(param|ema|optim)/(.*)", re.DOTALL)


class WeightRows(NamedTuple):
    """Rows [first, last) of a weight; `last` is None for all rows."""

    weight: str
    first: int = 0
    last: int | None = None

    @property
    def name(self) -> str:
        """The name of these rows as a parameter.

        >>> WeightRows("w", 3, 7).name, WeightRows("w").name
        ('w[3:7]', 'w')
        """
        return self.weight if self.last is None else f"{self.weight}[{self.first}:{self.last}]"


def parse_rows(parameter: str) -> WeightRows:
    """Return which rows a parameter's name stands for.

    >>> parse_rows("w[3:7]"), parse_rows("block.w")
    (WeightRows(weight='w', first=3, last=7), WeightRows(weight='block.w', first=0, last=None))
    """
    found = _ROWS.fullmatch(parameter)
    return WeightRows(found[1], int(found[2]), int(found[3])) if found else WeightRows(parameter)


def weight_of(parameter: str) -> str:
    """Return the weight that a parameter is rows of.

    >>> weight_of("w[3:7]")
    'w'
    """
    return parse_rows(parameter).weight


def piece_of(rows: WeightRows, row_counts: int) -> Piece:
    """Return the piece of these rows of a weight that has `row_counts` rows."""
    return Piece(rows.weight, rows.first, row_counts if rows.last is None else rows.last)


def rows_of(pieces: Pieces, row_counts: Mapping[str, int]) -> list[WeightRows]:
    """Return the rows of weights in a set of pieces; `row_counts`: how many rows each weight has."""
    return [
        WeightRows(weight) if (first, last) == (0, row_counts[weight]) else WeightRows(weight, first, last)
        for weight, first, last in pieces
    ]


def whole_name(tensor: str) -> tuple[str, WeightRows | None]:
    """Return the name that a tensor of the state has where nothing is sharded, and which rows of that it is.

    >>> whole_name("optim/w[3:7]/exp_avg"), whole_name("buffer/mean")
    (('optim/w/exp_avg', WeightRows(weight='w', first=3, last=7)), ('buffer/mean', None))
    """
    found = _parsed(tensor)
    if found is None:
        return tensor, None
    kind, parameter, key = found
    rows = parse_rows(parameter)
    return _named(kind, rows.weight, key), rows


def _parsed(tensor: str) -> tuple[str, str, str] | None:
    """Return the kind (param, ema, optim), parameter and key (of the optimizer) in a tensor's name; None for others."""
    found = _TENSOR.fullmatch(tensor)
    if found is None:
        return None
    parameter, _, key = found[2].partition("/") if found[1] == "optim" else (found[2], "", "")
    return found[1], parameter, key


def is_sharded(tensor: str, masters: Collection[str]) -> bool:
    """Return whether a tensor belongs to rows of a weight; those of others are the same on all workers.

    `masters`: the weights whose values are sharded too.
    """
    found = _parsed(tensor)
    return found is not None and (found[0] != "param" or weight_of(found[1]) in masters)


def restrict(
    tensors: Mapping[str, Packed],
    tree: Tree,
    wanted: Pieces,
    row_counts: Mapping[str, int],
    masters: Collection[str] = (),
) -> tuple[dict[str, Packed], Tree]:
    """Return what belongs to the wanted rows, out of a state that has them all, and nothing else: see `assemble`."""
    return assemble([(tensors, tree)], [rows.name for rows in rows_of(wanted, row_counts)], row_counts, masters)


def assemble(
    parts: Sequence[tuple[Mapping[str, Packed], Tree]],
    parameters: Iterable[str],
    row_counts: Mapping[str, int],
    masters: Collection[str] = (),
) -> tuple[dict[str, Packed], Tree]:
    """Return the tensors and the optimizer's tree of these parameters, from parts that together have their rows.

    `row_counts`: how many rows each weight has; one if it cannot be divided. `masters`: the weights whose values are
    sharded too; those of others are the same on all workers. What a weight does not have in any part, such as the state
    of an optimizer that has made no step, it does not get.
    Raises `ValueError` if some of a parameter's rows are missing.
    """
    tensors: dict[str, Packed] = {}
    optimizer: dict[str, Any] = {}
    offers: dict[str, list[_Offer]] = {}
    for has, tree in parts:
        for offer in _offers(has, tree, masters):
            offers.setdefault(offer.rows.weight, []).append(offer)
    for parameter in parameters:
        rows = parse_rows(parameter)
        first, last = piece_of(rows, row_counts[rows.weight])[1:]
        taken = list(_taken(offers.get(rows.weight, ()), first, last, row_counts[rows.weight]))
        if not taken:
            continue
        for kind, key in taken[0][0].tensors:
            slices = [_cut(offer, kind, key, low, high, row_counts[rows.weight]) for offer, low, high in taken]
            tensors[_named(kind, parameter, key)] = _concatenated(slices)
        values = taken[0][0].values
        if values is not None:
            optimizer[parameter] = renamed(values, f"optim/{taken[0][0].rows.name}/", f"optim/{parameter}/")
    return tensors, {"optimizer": optimizer}


class _Offer(NamedTuple):
    """What a part has of some rows of a weight."""

    rows: WeightRows
    tensors: Mapping[tuple[str, str], Packed]
    """By kind (param, ema, optim) and key."""
    values: Any
    """The optimizer's tree of these rows, if it has one."""


def _offers(tensors: Mapping[str, Packed], tree: Tree, masters: Collection[str]) -> Iterator[_Offer]:
    found: dict[str, dict[tuple[str, str], Packed]] = {}
    for tensor, packed in tensors.items():
        parsed = _parsed(tensor)
        if parsed is not None and is_sharded(tensor, masters):
            kind, parameter, key = parsed
            found.setdefault(parameter, {})[kind, key] = packed
    for parameter in {*found, *tree["optimizer"]}:
        yield _Offer(parse_rows(parameter), found.get(parameter, {}), tree["optimizer"].get(parameter))


def _taken(offers: Sequence[_Offer], first: int, last: int, row_counts: int) -> Iterator[tuple[_Offer, int, int]]:
    """Yield which rows [low, high) are taken from which offer, in order."""
    at = first
    while offers and at < last:
        able = [
            offer
            for offer in offers
            if piece_of(offer.rows, row_counts).first <= at < piece_of(offer.rows, row_counts).last
        ]
        if not able:
            raise ValueError(f"nobody gives row {at} of {offers[0].rows.weight}")
        best = max(able, key=lambda offer: piece_of(offer.rows, row_counts).last)
        end = min(last, piece_of(best.rows, row_counts).last)
        yield best, at, end
        at = end


def _cut(offer: _Offer, kind: str, key: str, low: int, high: int, row_counts: int) -> Packed:
    """Return rows [low, high) of a tensor in an offer; a value without dimensions as it is."""
    dtype, shape, data = offer.tensors[kind, key]
    first, last = piece_of(offer.rows, row_counts)[1:]
    if not shape or (low, high) == (first, last):
        return dtype, shape, data
    row = data.nbytes // (last - first)
    return dtype, (high - low, *shape[1:]), data[(low - first) * row : (high - first) * row]


def _concatenated(parts: Sequence[Packed]) -> Packed:
    dtype, shape, data = parts[0]
    if len(parts) == 1 or not shape:
        return dtype, shape, data
    return dtype, (sum(one[1][0] for one in parts), *shape[1:]), np.concatenate([one[2] for one in parts])


def values_of(
    tensors: Mapping[str, Packed], wanted: Pieces, row_counts: Mapping[str, int], masters: Collection[str] = ()
) -> dict[str, Packed]:
    """Return the values of the wanted rows of weights that `tensors` has whole, each under a name of its own.

    That name has numbers even if the rows are all of a weight. Those of `masters` go with the rows anyway.
    """
    found = {}
    for weight, first, last in wanted:
        if weight not in masters and (packed := tensors.get(f"param/{weight}")) is not None:
            dtype, shape, data = packed
            row = data.nbytes // max(1, row_counts[weight])
            shape = (last - first, *shape[1:]) if row_counts[weight] > 1 else shape
            found[f"param/{WeightRows(weight, first, last).name}"] = dtype, shape, data[first * row : last * row]
    return found


def put_values(tensors: Mapping[str, Packed], row_counts: Mapping[str, int]) -> dict[str, Packed]:
    """Return the tensors with what `values_of` has returned in the weights that it belongs to."""
    found, own = dict(tensors), set[str]()
    for name in tensors:
        whole, rows = whole_name(name)
        if rows is None or rows.last is None:
            continue
        dtype, shape, data = found[whole]
        if whole not in own:
            own.add(whole)
            data = data.copy()
            found[whole] = dtype, shape, data
        row = data.nbytes // max(1, row_counts[rows.weight])
        data[rows.first * row : rows.last * row] = found.pop(name)[2]
    return found


def first_rows(optimizer: Mapping[str, Any], owned: Iterable[WeightRows]) -> dict[str, Any]:
    """Return the trees of those weights whose first rows are `owned`, under the names of the weights.

    `optimizer`: by parameter, which can be rows of a weight.
    """
    first = {rows.weight for rows in owned if rows.first == 0}
    found = {}
    for parameter, values in optimizer.items():
        rows = parse_rows(parameter)
        if rows.weight in first and rows.first == 0:
            found[rows.weight] = renamed(values, f"optim/{parameter}/", f"optim/{rows.weight}/")
    return found


def _named(kind: str, parameter: str, key: str) -> str:
    return f"{kind}/{parameter}/{key}" if kind == "optim" else f"{kind}/{parameter}"


def renamed(value: Any, before: str, after: str) -> Any:
    """Return a tree in which the names of tensors that begin with `before` begin with `after` instead."""
    if isinstance(value, list):
        return [renamed(one, before, after) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("~") == "tensor":
        return {**value, "name": after + value["name"].removeprefix(before)}
    return {key: renamed(one, before, after) for key, one in value.items()}
