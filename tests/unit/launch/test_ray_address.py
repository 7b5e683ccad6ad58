"""Classification of Ray addresses."""

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.launch.ray_address import HERE, dashboard_of, is_dashboard, is_join, named_dashboard


def test_kinds_of_addresses() -> None:
    assert [is_dashboard(one) for one in (None, "", "10.0.0.1:6379", "ray://head:10001", HERE)] == [False] * 4 + [True]
    assert [is_join(one) for one in ("10.0.0.1:6379", "auto", "ray://head:10001", HERE)] == [True, True, False, False]


def test_the_dashboard_to_submit_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (dashboard_of(None), named_dashboard()) == (HERE, None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(InputError, match=r"10\.0\.0\.1:6379.*not the address of a dashboard"):
        dashboard_of(None)
    assert named_dashboard() is None
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    assert dashboard_of(None) == named_dashboard() == "http://10.0.0.1:8265"
    assert dashboard_of("https://other") == "https://other"
