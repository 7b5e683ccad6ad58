"""The requests to each cloud, and the meaning of its answers."""

from __future__ import annotations

import pytest

from raytrain_plus.workers.machine.spot import AZURE_TAG, Cloud, Request, cloud_of, look
from raytrain_plus.workers.machine.spot import MetadataAnswer as Answer
from tests.unit.workers.clouds import NAME, event, events

NOW = 1505722860.0
TOKEN = Answer(200, "a token")
NAMED = Answer(200, f"{NAME}\n")
FIRST = "Mon, 18 Sep 2017 08:22:00 GMT"
LATER = "Mon, 18 Sep 2017 08:23:00 GMT"


def looked(cloud: Cloud, *answers: Answer) -> tuple[list[Request], float | None]:
    """Return the requests, until the answers are used up, and the result."""
    asking = look(cloud, NOW)
    asked = [next(asking)]
    for answer in answers[:-1]:
        asked.append(asking.send(answer))
    with pytest.raises(StopIteration) as end:
        asking.send(answers[-1])
    return asked, end.value.value


def test_what_aws_is_asked() -> None:
    asked, goes = looked("AWS", TOKEN, Answer(404, "<html>"))
    assert goes is None
    assert asked == [
        Request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        Request("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": "a token"}),
    ]


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_preempts_a_machine(action: str) -> None:
    body = f'{{"action": "{action}", "time": "2017-09-18T08:22:00Z"}}'
    assert looked("AWS", TOKEN, Answer(200, body))[1] == 1505722920


@pytest.mark.parametrize(("said", "goes"), [("FALSE", None), ("TRUE", NOW + 25), ("TRUE\n", NOW + 25)])
def test_what_gcp_is_asked_and_says(said: str, goes: float | None) -> None:
    # Half a minute from the notice on, which may have come just after the last look.
    asked = [Request("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})]
    assert looked("GCP", Answer(200, said)) == (asked, goes)


def test_what_azure_is_asked() -> None:
    asked, goes = looked("Azure", Answer(200, events()))
    assert goes is None
    assert asked == [Request("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})]
    asked, goes = looked("Azure", Answer(200, events(event([NAME], FIRST))), NAMED)
    assert goes == 1505722920
    where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    assert asked[1:] == [Request("GET", where, {"Metadata": "true"})]


@pytest.mark.parametrize(
    ("told", "goes"),
    [
        ([event(["another"], FIRST)], None),
        ([event(["another", NAME], FIRST)], 1505722920),
        ([event([NAME.upper()], FIRST)], 1505722920),
        ([event([NAME], FIRST, "Terminate")], 1505722920),
        ([event([NAME], LATER), event(["another"], ""), event([NAME], FIRST)], 1505722920),
        # An event that has begun has no time.
        ([event([NAME], "")], NOW),
    ],
)
def test_azure_preempts_machines(told: list[dict[str, object]], goes: float | None) -> None:
    assert looked("Azure", Answer(200, events(*told)), NAMED)[1] == goes


@pytest.mark.parametrize("kind", ["Freeze", "Reboot", "Redeploy"])
def test_events_that_azures_machines_survive_are_no_notice(kind: str) -> None:
    assert looked("Azure", Answer(200, events(event([NAME], FIRST, kind), event([NAME], "", kind))))[1] is None


@pytest.mark.parametrize(
    ("cloud", "answers", "why"),
    [
        ("AWS", [Answer(403, "")], "unexpected status 403"),
        ("AWS", [TOKEN, Answer(401, "")], "unexpected status 401"),
        ("AWS", [TOKEN, Answer(200, "<html>")], "Expecting value"),
        ("AWS", [TOKEN, Answer(200, "[]")], r"unexpected action '\[\]'"),
        (
            "AWS",
            [TOKEN, Answer(200, '{"action": "noop", "time": "2017-09-18T08:22:00Z"}')],
            "unexpected action",
        ),
        ("AWS", [TOKEN, Answer(200, '{"action": "stop", "time": "2017-09-18T08:22:00"}')], "unexpected action"),
        ("AWS", [TOKEN, Answer(200, '{"action": "stop", "time": "soonZ"}')], "soon"),
        ("GCP", [Answer(404, "")], "unexpected status 404"),
        ("GCP", [Answer(200, "true")], "unexpected value of preempted: 'true'"),
        ("Azure", [Answer(400, "{}")], "unexpected status 400"),
        ("Azure", [Answer(200, "{}")], "unexpected events '{}'"),
        ("Azure", [Answer(200, '{"Events": [3]}')], "unexpected events"),
        ("Azure", [Answer(200, events(event(["a"], "tomorrow")))], "tomorrow"),
        ("Azure", [Answer(200, events(event(["a"], "Mon, 18 Sep 2017 08:22:00")))], "has no time zone"),
        (
            "Azure",
            [Answer(200, events(event([NAME], FIRST))), Answer(500, "")],
            "unexpected status 500",
        ),
    ],
)
def test_nonsense_is_no_notice(cloud: Cloud, answers: list[Answer], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        looked(cloud, *answers)


@pytest.mark.parametrize(
    ("firmware", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge", "bios_version": "1.0"}, "AWS"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "AWS"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.17"}, None),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "GCP"),
        ({"sys_vendor": "Google", "product_name": "Voema"}, None),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG}, "Azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "None"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC (Q35 + ICH9, 2009)"}, None),
        ({}, None),
    ],
)
def test_whose_machine_it_is(firmware: dict[str, str], cloud: Cloud | None) -> None:
    assert cloud_of(firmware) == cloud
