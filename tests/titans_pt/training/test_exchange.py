"""Two ranks: the ways to exchange gradients and to write checkpoints change no result.

Given weights reach every topology.
"""

import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from tests.helpers.untrained import untrained_run
from titans_pt.config.files import load_config
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run
from titans_pt.tasks.language import Language
from titans_pt.training.engine import Engine

pytestmark = pytest.mark.timeout(3600)  # starting processes is slow on a busy machine

SHARDS = ["train.checkpoint_shards=true", "train.keep_last=9"]
BUCKETS = ["parallel.overlap=true", "parallel.reduce_bucket=3000"]


JOBS = {
    "1": [],
    "2": ["parallel.zero_stage=2"], "2-buckets": ["parallel.zero_stage=2", *BUCKETS],
    "2-shards@1": ["parallel.zero_stage=2", *SHARDS, "train.stop_at=2"],
    "2-shards@2": ["parallel.zero_stage=2", *SHARDS],
    "moved@1": ["parallel.tensor=2", *SHARDS, "train.stop_at=2"], "moved@2": ["parallel.zero_stage=3", *SHARDS],
}  # fmt: skip
SLOW = {
    "1-buckets": [*BUCKETS, "parallel.gather_bucket=2000"],
    "3": ["parallel.zero_stage=3"],
    "3-buckets": ["parallel.zero_stage=3", "parallel.overlap=false", "parallel.reduce_bucket=3000"],
    "3-shards@1": ["parallel.zero_stage=3", *SHARDS, "train.stop_at=2"],
    "3-shards@2": ["parallel.zero_stage=3", *SHARDS],
    "bf16": ["train.precision=bf16"], "bf16-fp32": ["train.precision=bf16", "parallel.reduce_fp32=true"],
    "half@1": ["train.precision=bf16", *SHARDS, "train.stop_at=2"], "half@2": ["train.precision=bf16", *SHARDS],
}  # fmt: skip


def train(folder, prepared, jobs):
    from tests.helpers.matrix import write_config

    jobs = {name: ["model.mixers=[lmm]", "train.stop_at=4", *overrides] for name, overrides in jobs.items()}
    run_jobs(2, write_config(folder, prepared), folder, jobs, timeout=3600)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared):
    folder = tmp_path_factory.mktemp("runs")
    source = untrained_run(folder / "source", prepared, mixers=["lmm"])
    given = [f"train.init_from={source}", "model.d_model=16", "model.n_layers=1", "model.n_heads=2",
             "model.mlp_hidden=32", "model.memory.depth=1", "model.memory.expansion=4"]  # fmt: skip
    ranks = {"given": given, "given-tensor": [*given, "parallel.tensor=2", "parallel.zero_stage=3"]}
    train(folder, prepared, JOBS | ranks)
    return folder


@pytest.fixture(scope="module")
def more(runs, prepared):
    train(runs, prepared, SLOW)
    return runs


@pytest.mark.thorough
def test_buckets_and_overlap_change_nothing(runs, stage=2):
    found = curve(runs / f"{stage}-buckets", "loss", "grad_norm")
    assert len(found) == 4
    assert found == curve(runs / str(stage), "loss", "grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_nor_do_they_under_other_stages(more, stage):
    test_buckets_and_overlap_change_nothing(more, stage)


@pytest.mark.thorough
def test_a_resume_from_shards_is_bit_for_bit_a_whole_run(runs, shards="2-shards", whole="2"):
    assert curve(runs / shards, "loss", "grad_norm") == curve(runs / whole, "loss", "grad_norm")
    written, one = (checkpoints.find(runs / name / "checkpoints", 4) for name in (shards, whole))
    assert {path.name for path in written.iterdir()} == {
        "shard-00000.safetensors",
        "shard-00000.json",
        "shard-00001.safetensors",
        "shard-00001.json",
        "tensors.json",
        "trainer.json",
        "manifest.json",
    }
    with checkpoints.Tensors(written) as found, checkpoints.Tensors(one) as expected:
        assert found.shapes() == expected.shapes()
        for name in expected.shapes():
            for kind in (checkpoints.WEIGHT, "exp_avg", "exp_avg_sq"):
                assert torch.equal(found.get(kind, name), expected.get(kind, name)), (kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "whole"), [("3-shards", "3"), ("half", "bf16")])
def test_so_it_is_under_zero_3_and_in_bf16(more, shards, whole):
    test_a_resume_from_shards_is_bit_for_bit_a_whole_run(more, shards, whole)


@pytest.mark.thorough
def test_shards_of_one_topology_are_read_by_another(runs):
    found, expected = (curve(runs / name, "loss", "grad_norm") for name in ("moved", "1"))
    assert [x[0] for x in found] == [1, 2, 3, 4]
    assert [x[1] for x in found] == pytest.approx([x[1] for x in expected], abs=1e-5)
    assert load_run(runs / "moved").step == 4


@pytest.mark.slow
def test_an_exchange_in_fp32_leaves_out_the_rounding_to_bf16(more):
    """Micro-batches are summed in fp32 before the exchange: in bf16 it rounds even one rank's gradients."""
    rough, better = (curve(more / name, "loss", "grad_norm") for name in ("bf16", "bf16-fp32"))
    assert len(rough) == 4 and better[0][1] == rough[0][1] and better[0][2] != rough[0][2]
    assert better[0][2] == pytest.approx(rough[0][2], rel=2e-3)
    assert [x[1] for x in better] == pytest.approx([x[1] for x in rough], rel=1e-2)


@pytest.mark.thorough
def test_given_weights_under_tensor_parallelism_and_zero_3(runs):
    one, two = (curve(runs / name, "loss", "grad_norm") for name in ("given", "given-tensor"))
    assert [x[1] for x in two] == pytest.approx([x[1] for x in one], abs=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_settings_reach_deepspeed(tiny, ranks, stage):
    given = {"overlap": stage == 1, "reduce_bucket": 300, "reduce_fp32": True, "zero_stage": stage}
    given |= {"gather_bucket": 400} if stage == 1 else {}
    config = load_config(tiny(parallel=given, train={"precision": "bf16"}))
    task = Language(config)
    engine = Engine(task, task.build_model(), ranks)._engine
    zero = engine.optimizer
    assert zero.communication_data_type == torch.float32
    assert engine.zero_overlap_comm() == (stage == 1)
    assert zero.reduce_bucket_size == 300
    assert stage == 3 or zero.allgather_bucket_size == 400


@pytest.mark.slow
def test_two_nodes_of_two_ranks_under_zero_3(tmp_path, prepared):
    """Losses, also after a resume, are those of ZeRO 3 over all four ranks."""
    from tests.helpers.matrix import write_config

    hybrid = ["parallel.zero_stage=3", "parallel.node_ranks=2", *SHARDS]
    jobs = {"flat": ["parallel.zero_stage=3"], "hybrid@1": [*hybrid, "train.stop_at=2"], "hybrid@2": hybrid}
    jobs = {name: ["train.stop_at=4", *overrides] for name, overrides in jobs.items()}
    run_jobs(4, write_config(tmp_path, prepared), tmp_path, jobs, timeout=3600)
    found, expected = (curve(tmp_path / name, "loss", "grad_norm") for name in ("hybrid", "flat"))
    assert len(found) == 4 and found == expected
