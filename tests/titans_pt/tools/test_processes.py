"""This process and its environment, which other programs also write to."""

import pytest

from titans_pt.errors import UserError
from titans_pt.tools.processes import Place, check_alone, place


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, Place()),
    ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, Place()),
    ({"MASTER_ADDR": "node7"}, Place()),
    ({"RANK": "0"}, Place()),
    ({"RANK": "abc", "LOCAL_RANK": "x"}, Place()),
    ({"WORLD_SIZE": "1", "LOCAL_RANK": "2"}, Place(0, 1, 2)),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Place(3, 4, 1)),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": ""}, Place(3, 4)),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(3, 4, 1, 2)),  # torchrun
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, Place(3, 4, 1, 2)),  # deepspeed
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"}, Place(3, 4)),
])  # fmt: skip
def test_place(environment, expected):
    assert place(environment) == place(environment, strict=False) == expected


@pytest.mark.parametrize(("environment", "message"), [
    ({"WORLD_SIZE": "nonsense"}, "WORLD_SIZE: given 'nonsense'; must be the number of processes"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE: given '0'"),
    ({"WORLD_SIZE": "-1"}, "WORLD_SIZE: given '-1'"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not; start with torchrun"),
    ({"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE=2 is set, but RANK is not"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: given '2'; must be a number below WORLD_SIZE, which is 2"),
    ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK: given 'x'"),
    ({"RANK": "3"}, "RANK: given '3'; must be a number below WORLD_SIZE, which is not set: one process"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK: given 'x'"),
])  # fmt: skip
def test_a_place_that_cannot_be(environment, message):
    with pytest.raises(UserError, match=message):
        place(environment)
    assert place(environment, strict=False) == Place()


@pytest.mark.parametrize(("variable", "program"), [
    ("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec"),
])  # fmt: skip
def test_tasks_that_do_not_know_of_one_another_are_refused(variable, program):
    with pytest.raises(UserError, match=f"{program} started 2 tasks of this command.*Start it so. .* set WORLD_SIZE=1"):
        check_alone("Start it so", {variable: "2"})
    check_alone("Start it so", {variable: "2"}, allowed=2)
    check_alone("Start it so", {variable: "2", "WORLD_SIZE": "1"})
    check_alone("Start it so", {variable: "1"})
    check_alone("Start it so", {variable: "", "SLURM_NTASKS": "2"})  # of an allocation, not of this command
