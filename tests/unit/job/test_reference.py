"""The page of settings says what the code says."""

from pathlib import Path

from raytrain_plus.job.reference import reference

PAGE = Path(__file__).parents[3] / "jobs" / "README.md"


def test_the_page_holds_every_setting() -> None:
    page = PAGE.read_text()
    assert page.endswith(reference()), "run: python -m raytrain_plus.job.reference"
    for name in ("data.path", "elastic.on_nonfinite", "checkpoint.keep_best.mode", "storage"):
        assert f"- `{name}` (" in page
