"""Describe how the data that a node sees differs from what another has seen, file by file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_plus.data.convert.packed import changes_of_packed
from raytrain_plus.data.sources.items import changes_of


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Describe by file how two descriptions of data (`Source.describe`) differ; by its rows if its files do not."""
    found = _differences(now, then)
    if not found and now["fingerprint"] != then["fingerprint"]:
        found = ["some rows have other values, or another order"]
    return found


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    found = []
    if now.get("tokenizer_sha256") != then.get("tokenizer_sha256"):
        found.append("data.tokenizer has another content")
    if now.get("end_token") != then.get("end_token"):
        found.append("data.tokenizer names another token that ends a document")
    found += changes_of_packed(now.get("packed"), then.get("packed"))
    if "sources" in now or "sources" in then:
        return found + _differences_of_mixes(now, then)
    if "dataset" in now or "dataset" in then:
        both = "dataset" in now and "dataset" in then
        return found + (changes_of(now["dataset"], then["dataset"]) if both else ["only one of them is at a path"])
    if now.get("windows") != then.get("windows"):
        return [*found, "it is cut into other windows, or not at all"]
    if "converted_from" in now and "converted_from" in then:
        # Their files are those of the conversion, whose names tell a user nothing.
        fewer = [f"it has {now['rows']:,} rows, not {then['rows']:,}"] if now["rows"] != then["rows"] else []
        return found or fewer
    return found + _differences_of_files(now["files"], then["files"], "content" if "windows" in now else "footer")


def _differences_of_mixes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    mine, theirs = now.get("sources"), then.get("sources")
    if not isinstance(mine, list) or not isinstance(theirs, list) or len(mine) != len(theirs):
        return ["data.mix has another number of sources"]
    found = []
    # Items that are read by index are no files.
    indexed = {str(number) for number, source in enumerate(mine) if "dataset" in source}
    for number, (one, there) in enumerate(zip(mine, theirs, strict=True)):
        # Their files are compared below.
        own = _differences({**one, "files": []}, {**(there if isinstance(there, Mapping) else {}), "files": []})
        found += [f"source {number}: {difference}" for difference in own]
    here, there = ([f for f in one["files"] if f["path"].partition("/")[0] not in indexed] for one in (now, then))
    return found + _differences_of_files(here, there)


def _differences_of_files(
    now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]], compared: str = "footer"
) -> list[str]:
    found = []
    here = {file["path"]: file for file in now}
    there = {file["path"]: file for file in then}
    found += [f"{path} is missing" for path in sorted(there.keys() - here.keys())]
    found += [f"{path} is new" for path in sorted(here.keys() - there.keys())]
    for path in sorted(here.keys() & there.keys()):
        mine, theirs = here[path], there[path]
        if mine["bytes"] != theirs["bytes"]:
            found.append(f"{path} has {mine['bytes']:,} bytes, not {theirs['bytes']:,}")
        elif mine["footer_sha256"] != theirs["footer_sha256"]:
            found.append(f"{path} has a different {compared}")
    return found
