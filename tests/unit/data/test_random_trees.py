"""Whatever a folder holds, every row of it is read, or a sentence says why none is."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import dataset
from raytrain_plus.data.sources.converted_source import ConvertedSource
from raytrain_plus.errors import DataError

PLAIN = [b"a", b"b1", b"2024-01", b"lang=de", b"lang=fr", b"a b", b"x[1]", b"*", b"d.parquet", b"\xc3\xa9", b"A", b"-"]
ODD = [b"caf\xe9", b"\xff\xfe", b"a\nb", b"", b"\x01"]
HIDDEN = [b".h", b"_h", b"."]
SUFFIXES = [b".jsonl", b".csv", b".txt", b".parquet"]


def content(suffix: bytes, rows: int) -> bytes:
    if suffix == b".txt":
        return b"line\n" * rows
    if suffix == b".jsonl":
        return b'{"x": 1.5, "y": 2}\n' * rows
    if suffix == b".csv":
        return b"x,y\n" + b"1.5,2\n" * rows
    out = io.BytesIO()
    pq.write_table(pa.table({"x": [1.5] * rows, "y": [2] * rows}), out)
    return out.getvalue()


class Tree:
    """A tree of files that a generator has drawn; `odd`: whether it has anything that may be refused."""

    def __init__(self, root: bytes, draw: random.Random) -> None:
        self.root, self.draw, self.odd, self.files = root, draw, False, 0
        self.suffix = draw.choice(SUFFIXES)
        self.folders = [root]
        os.makedirs(root)
        for _ in range(draw.randint(1, 12)):
            self.add()

    def name(self) -> bytes:
        if self.draw.random() < 0.06:
            self.odd = True
            return self.draw.choice(ODD)
        return self.draw.choice(HIDDEN if self.draw.random() < 0.1 else PLAIN)

    def add(self) -> None:
        draw = self.draw
        inside = draw.choice(self.folders)
        name, what = self.name(), draw.random()
        if what < 0.3:
            made = os.path.join(inside, name or b"n")
            if not os.path.lexists(made):
                os.mkdir(made)
                self.folders.append(made)
            return
        suffix, rows = self.suffix, draw.randint(1, 4)
        if what > 0.92:
            suffix = draw.choice([*SUFFIXES, b".md", b"", b".JSONL", b".gz"])
        made = os.path.join(inside, name + suffix)
        if os.path.lexists(made):
            return
        self.odd = self.odd or suffix != self.suffix
        if 0.3 < what < 0.42:
            self.odd = True
            targets = [b"nothing", self.root, inside, *self.folders, b"/dev/null", b"/dev/zero", made]
            with contextlib.suppress(FileExistsError):
                os.symlink(draw.choice(targets), made if draw.random() < 0.5 else made.removesuffix(suffix) + b"-l")
            return
        if what < 0.45:
            self.odd = True
            bad = [
                b"",
                b"\x00",
                b"\n\n",
                b"{",
                content(suffix, rows)[:-7],
                b"\xff" * 9,
                content(suffix, 0),
                b'{"x": {}}\n',
            ]
            whole = draw.choice(bad)
        else:
            whole = content(suffix, rows)
        with open(made, "wb") as file:
            file.write(whole)


def rows_there(root: bytes, suffix: bytes) -> int:
    """Return the rows of the files with this suffix, found and read by other code than the platform's."""
    found = 0
    for inside, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not name.startswith((b".", b"_"))]
        for name in names:
            file = os.path.join(inside, name)
            if name.lower().endswith(suffix) and not name.startswith((b".", b"_")) and os.path.isfile(file):
                with open(file, "rb") as opened:
                    whole = opened.read()
                if suffix == b".parquet":
                    found += pq.read_table(io.BytesIO(whole)).num_rows
                else:
                    found += sum(bool(line.strip()) or suffix == b".txt" for line in whole.splitlines()) - (
                        suffix == b".csv"
                    )
    return found


def check(folder: Path, number: int) -> bool:
    """Draw a tree and read it; return whether it was read."""
    tree = Tree(os.fsencode(folder / "data"), random.Random(number))
    try:
        seen = dataset(Path(os.fsdecode(tree.root)), cache=folder / "cache")
    except DataError as error:
        if not tree.odd and rows_there(tree.root, tree.suffix):
            raise
        # It can be printed.
        str(error).encode()
        return False
    kinds = [
        kind
        for kind in SUFFIXES
        if (seen.origin.format or "" if isinstance(seen, ConvertedSource) else "parquet")
        in kind.decode().replace("txt", "text")
    ]
    assert seen.rows == rows_there(tree.root, *kinds), f"tree {number}"
    return True


@pytest.mark.timeout(60)
def test_every_row_is_read_or_a_sentence_says_why_not(tmp_path: Path) -> None:
    read = run(tmp_path, range(150))
    assert 40 < read < 120


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_of_two_thousand_trees(tmp_path: Path) -> None:
    run(tmp_path, range(1000, 3000))


def run(folder: Path, numbers: range) -> int:
    read = 0
    for number in numbers:
        read += check(folder / str(number), number)
        shutil.rmtree(folder / str(number))
    return read
