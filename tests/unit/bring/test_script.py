"""A script is executed as Python executes it, with settings given beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from raytrain_plus.bring.script import run_script, with_overrides
from raytrain_plus.errors import InputError

SCRIPT = """
import json, sys
from pathlib import Path
import beside
from raytrain_plus.bring.script import with_overrides

found = [__name__, sys.argv[1:], beside.NAME, with_overrides({"workers": {"min": 2}, "steps": 3})]
Path(__file__).with_name("told.json").write_text(json.dumps(found))
"""


def test_a_script_has_its_folder_its_arguments_and_the_settings(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = list(sys.argv), list(sys.path)
    run_script(
        script,
        ["workers.max=3", "reduction=exact", "parallel.sharded=full", "steps=5", "clip_norm=1e-3"],
        ["--lr", "1"],
    )
    settings = {
        "workers": {"min": 2, "max": 3},
        "reduction": "exact",
        "parallel": {"sharded": "full"},
        "steps": 5,
        "clip_norm": 0.001,
    }
    told = (tmp_path / "told.json").read_text()
    assert json.loads(told) == ["__main__", ["--lr", "1"], "beside", settings]
    assert (list(sys.argv), list(sys.path)) == before
    assert with_overrides({"steps": 3}) == {"steps": 3}


def test_what_is_no_script_or_no_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file not found"):
        run_script(tmp_path / "none.py", [], [])
    script = tmp_path / "train.py"
    script.write_text("from raytrain_plus.bring.script import with_overrides\nwith_overrides({})\n")
    with pytest.raises(InputError, match="'workers' is no setting"):
        run_script(script, ["workers"], [])
    with pytest.raises(InputError, match="is not valid YAML"):
        run_script(script, ["workers=[1"], [])
