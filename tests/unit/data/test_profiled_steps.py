"""Steps to profile must be among those of a job whose length only its data tells."""

from __future__ import annotations

import pytest

from raytrain_plus import Data, Job, Profile
from raytrain_plus.data.of_job import check_profiled
from raytrain_plus.errors import InputError


def test_steps_beyond_the_epochs_of_a_job_cannot_be_profiled() -> None:
    data = Data(path="d", batch_size=8)
    job = Job(name="x", task="a:B", data=data, epochs=1, profile=Profile(steps=[3, 10]))
    check_profiled(job, 10)
    with pytest.raises(InputError, match=r"\[3, 10\] ends after the job's last step: it has 9 steps") as error:
        check_profiled(job, 9)
    assert error.value.where == "profile.steps"
    check_profiled(Job(name="x", task="a:B", data=data, epochs=1), 9)
