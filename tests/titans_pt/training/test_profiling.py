"""The step profiler: what it records, when, and what it makes of it."""

import gzip
import json
import logging
import time

import pytest
import torch

from titans_pt.errors import UserError
from titans_pt.kernels.memory.fused.configurations import KERNELS
from titans_pt.training.profiling import OutOfMemory, StepProfiler, Stopwatch, kind_of, start_profile, time_shares


@pytest.mark.parametrize(("name", "kind"), [
    ("aten::bmm", "matrix product"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix product"),
    ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
    *((kernel, "memory") for kernel in KERNELS),
    ("titans::memory_backward", "memory"),
    ("triton_per_fused_add_mean_mul_4", "element-wise"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "exchange"),
    ("void at::native::vectorized_elementwise_kernel<4, ...>", "element-wise"),
    ("multi_tensor_apply_kernel", "optimizer"),
    ("something_else", "other"),
])  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_shares_of_a_matrix_product():
    x = torch.randn(512, 512)
    x @ x
    profiler = start_profile()
    for _ in range(20):
        x @ x
    profiler.stop()
    shares = time_shares(profiler)
    assert sum(shares.values()) == pytest.approx(1)
    assert next(iter(shares)) == "matrix product" and shares["matrix product"] > 0.5


def test_it_records_the_steps_it_was_asked_for(tmp_path, caplog):
    steps = StepProfiler(tmp_path / "profile", first=2, count=2)
    x = torch.randn(64, 64)
    with caplog.at_level(logging.INFO):
        for step in range(1, 6):
            steps.before(step)
            for _ in range(step):
                x @ x
            steps.after(step)
    steps.close()
    path = tmp_path / "profile" / "step-00000002.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2 + 3
    assert "profile of step 2 on: " in caplog.text and str(path) in caplog.text
    assert [p.name for p in (tmp_path / "profile").iterdir()] == [path.name]


def test_a_run_that_ends_while_it_records_keeps_what_there_is(tmp_path):
    steps = StepProfiler(tmp_path, first=1, count=10)
    steps.before(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    steps.after(1)
    assert not list(tmp_path.iterdir())
    steps.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_profile_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / "profile").write_text("no folder")
    steps = StepProfiler(tmp_path / "profile", first=1, count=1)
    steps.before(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    steps.after(1)
    steps.close()
    assert "step-00000001.json.gz: the profile could not be written" in caplog.text


def test_none_is_none(tmp_path):
    steps = StepProfiler(tmp_path, first=None, count=3)
    for step in range(5):
        steps.before(step)
        steps.after(step)
    steps.close()
    assert not list(tmp_path.iterdir())


def test_stopwatch_adds_what_has_one_name():
    watch = Stopwatch(torch.device("cpu"))
    for name, seconds in (("forward", 0.02), ("backward", 0.05), ("forward", 0.02)):
        time.sleep(seconds)
        watch.mark(name)
    found = watch.seconds()
    assert list(found) == ["forward", "backward"]
    assert 0.04 <= found["forward"] < 0.5 and 0.05 <= found["backward"] < 0.5


def test_out_of_memory_is_one_line(tmp_path):
    told = pytest.raises(UserError, match="out of GPU memory: lower train.micro_batch=8; memory snapshot: ")
    with told, OutOfMemory(tmp_path, torch.device("cpu"), "lower train.micro_batch=8"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_other_errors_pass(tmp_path):
    with pytest.raises(KeyError), OutOfMemory(tmp_path, torch.device("cpu"), ""):
        raise KeyError("x")


@pytest.mark.gpu
def test_out_of_memory_leaves_a_snapshot(tmp_path):
    with pytest.raises(UserError), OutOfMemory(tmp_path, torch.device("cuda"), "less"):
        torch.empty(2**50, device="cuda")
    assert (tmp_path / "memory-snapshot-rank0.pickle").stat().st_size > 0


@pytest.mark.gpu
def test_a_gpu_is_busy_with_what_it_was_given():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x @ x
    profiler = start_profile()
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
    profiler.stop()
    shares = time_shares(profiler)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["matrix product"] > 0.8
