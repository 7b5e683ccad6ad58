"""The fixes: each applies exactly once, or raises an error."""

from pathlib import Path

import pytest

from raytrain_plus.errors import RunError
from raytrain_plus.install.edit import Edit, apply_all, digest
from raytrain_plus.install.fixes import EDITS


def test_every_edit_has_a_unique_name_and_a_reason() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    assert all(edit.reason and edit.old != edit.new for edit in EDITS)


def test_an_edit_applies_once_or_not_at_all(tmp_path: Path) -> None:
    edit = Edit("e", "a.cc", "why", "old", "new")
    (tmp_path / "a.cc").write_text("an old thing")
    apply_all(tmp_path, [edit])
    assert (tmp_path / "a.cc").read_text() == "an new thing"
    with pytest.raises(RunError, match=r"the fix 'e' does not apply to Horovod's a\.cc: .* 0 times"):
        edit.apply(tmp_path)
    (tmp_path / "a.cc").write_text("old old")
    with pytest.raises(RunError, match="2 times"):
        edit.apply(tmp_path)
    with pytest.raises(RunError, match=r"b\.cc"):
        Edit("e", "b.cc", "why", "old", "new").apply(tmp_path)


def test_the_digest_changes_with_any_edit() -> None:
    changed = (*EDITS[:-1], Edit("x", EDITS[-1].file, "", EDITS[-1].old, EDITS[-1].new + " "))
    assert digest(EDITS) != digest(changed)
    assert len(digest(EDITS)) == 8
