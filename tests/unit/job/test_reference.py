"""The page of settings says what the code says."""

from pathlib import Path

from raytrain_plus.job.combinations import refused, table
from raytrain_plus.job.reference import reference
from raytrain_plus.job.settings import Parallel

JOBS = Path(__file__).parents[3] / "jobs"


def test_the_page_holds_every_setting() -> None:
    page = (JOBS / "reference.md").read_text()
    assert page.endswith(reference()), "run: python -m raytrain_plus.job.reference"
    for name in ("data.path", "elastic.on_nonfinite", "checkpoint.keep_best.mode", "storage"):
        assert f"- `{name}` (" in page


def test_the_page_says_what_combines() -> None:
    assert table() in (JOBS / "parallel.md").read_text(), "run: python -m raytrain_plus.job.combinations"
    stages = Parallel(pipeline=2, schedule="zero-bubble")
    assert not refused({})
    assert refused({"compile": True, "parallel": stages}).startswith("the zero-bubble schedule divides")
