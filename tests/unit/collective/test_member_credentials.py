"""Credentials prove one member of one world, and nobody else."""

from __future__ import annotations

import pytest

from raytrain_plus.collective.member_credentials import Credentials, credentials_of, link_proof, new_secret, rank_of


def test_a_token_proves_its_member_only_in_its_world() -> None:
    secret, other = new_secret(), new_secret()
    tokens = [credentials_of(secret, rank, 3).token for rank in range(3)]
    assert [rank_of(secret, token, 3) for token in tokens] == [0, 1, 2]
    assert [rank_of(other, token, 3) for token in tokens] == [None] * 3
    # A smaller world has fewer members.
    assert rank_of(secret, tokens[2], 2) is None


def test_no_token_can_be_derived_from_another() -> None:
    secret = new_secret()
    token = credentials_of(secret, 1, 3).token
    proof = token.partition(".")[2]
    for forged in (
        "",
        ".",
        "1",
        "1.",
        f"0.{proof}",
        f"2.{proof}",
        f"-1.{proof}",
        f"01.{proof[:-1]}",
        proof,
        f"\xb2.{proof}",
    ):
        assert rank_of(secret, forged, 3) is None, forged


def test_a_link_key_is_known_to_two_members() -> None:
    secret = new_secret()
    links = [credentials_of(secret, rank, 4).link_keys for rank in range(4)]
    keys = set()
    for one in range(4):
        assert links[one][one] == ""
        for other in range(one):
            assert links[one][other] == links[other][one]
            keys.add(links[one][other])
    assert len(keys) == 6
    assert len({len(key) for key in keys}) == 1


def test_a_proof_names_its_prover() -> None:
    key, challenge = credentials_of(new_secret(), 0, 2).link_keys[1], b"x" * 32
    assert link_proof(key, 0, challenge) != link_proof(key, 1, challenge)
    assert link_proof(key, 0, challenge) != link_proof(key, 0, b"y" * 32)


@pytest.mark.parametrize("shown", [repr, str, "{!r}".format])
def test_credentials_are_never_shown(shown: object) -> None:
    found = credentials_of(new_secret(), 0, 2)
    assert callable(shown)
    text = shown(found)
    assert text == "Credentials()"
    assert found != Credentials()
