"""Find credentials that obstore does not: profiles of AWS, some of Google's files, Azure's command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from raytrain_plus.errors import InputError, StorageError

Provider = Callable[[], dict[str, Any]]
"""Called by obstore, from any thread, once what it gave before has nearly expired."""
VALID = timedelta(minutes=15)
"""How long obstore keeps credentials; it asks again five minutes earlier, and boto3 renews them when asked."""
_AZURE_SECRETS = re.compile(r"AZURE_(?:STORAGE_)?(?:\w*KEY|SAS_TOKEN|TOKEN|CLIENT_SECRET|FEDERATED_TOKEN_FILE)")


def aws_credentials(environment: Mapping[str, str]) -> Provider | None:
    """Return what finds credentials as boto3 does: environment, profiles, SSO, roles of web identities and machines.

    Without boto3 it is None: obstore knows the environment and the roles. Raises `InputError` if a profile is named
    that does not exist, or that only boto3 could read.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError:
        _refuse_profile(environment)
        return None
    try:
        session = boto3.session.Session()
    except BotoCoreError as error:
        raise InputError(str(error), where="AWS_PROFILE", remedy="name a profile that ~/.aws/config has") from None

    def find() -> dict[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise StorageError("boto3 finds no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        key, secret, token = found.get_frozen_credentials()[:3]
        until = datetime.now(timezone.utc) + VALID
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": until}

    return find


def _refuse_profile(environment: Mapping[str, str]) -> None:
    """Raise `InputError` if the only credentials are in files, which only boto3 reads."""
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
    roles = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if any(environment.get(name) for name in (*others, *roles)):
        return
    home = Path(environment.get("HOME", "/"), ".aws")
    if environment.get("AWS_PROFILE") or any((home / name).is_file() for name in ("credentials", "config")):
        raise InputError(
            "the AWS credentials are in files of profiles, which need boto3",
            where="~/.aws",
            remedy="pip install 'raytrain-plus[s3]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )


def google_credentials() -> Provider | None:
    """Return what finds credentials as Google's own library does, also of federated and impersonated identities.

    None if google-auth is not installed.
    """
    try:
        import google.auth
        from google.auth.transport.requests import Request
    except ModuleNotFoundError:
        return None

    def find() -> dict[str, Any]:
        found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
        found.refresh(Request())
        return {"token": found.token, "expires_at": found.expiry and found.expiry.replace(tzinfo=timezone.utc)}

    return find


def is_logged_in_to_azure(environment: Mapping[str, str]) -> bool:
    """Return whether Azure's command line has credentials and the environment has none.

    obstore would ask for the identity of a virtual machine instead.
    """
    if any(_AZURE_SECRETS.fullmatch(name) for name in environment):
        return False
    home = environment.get("AZURE_CONFIG_DIR") or Path(environment.get("HOME", "/"), ".azure")
    return Path(home, "azureProfile.json").is_file()


def no_credentials() -> dict[str, Any]:
    """Return an empty token: obstore asks for one before it writes to Google, even to a server that checks none."""
    return {"token": "", "expires_at": None}
