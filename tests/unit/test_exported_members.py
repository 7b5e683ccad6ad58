"""The public names are few, and all of them are there."""

import raytrain_plus


def test_every_public_name_is_there() -> None:
    assert all(getattr(raytrain_plus, name) is not None for name in raytrain_plus.__all__)
    assert sorted(raytrain_plus.__all__, key=str.lower) == sorted(set(raytrain_plus.__all__), key=str.lower)
