"""Shards: any ranks read what any others wrote; a checkpoint is complete or does not exist."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from tests.titans_pt.runs.test_checkpoints import STATE
from titans_pt import cli
from titans_pt.reproduce.runs import weights_hash
from titans_pt.runs import checkpoints
from titans_pt.runs.shards import ShardReader, Whole, shard_file, write_shard

WHOLE = {"a": torch.randn(4, 6), "b": torch.randn(6, 4), "c": torch.randn(5)}
CUTS = {"a": Whole((4, 6), 0, 2), "b": Whole((6, 4), 1, 2), "c": Whole((5,))}
KINDS = (checkpoints.WEIGHT, "exp_avg", "exp_avg_sq")
AT = {"a": (5, 7), "b": (0, 12), "c": (2, 5)}
"""Ends of the pieces that data ranks 0 and 1 hold of each part; rank 0 has nothing of b."""


def value(kind: str, name: str) -> torch.Tensor:
    return WHOLE[name] * (1 + KINDS.index(kind)) + 0.1


def write(folder, step=5, numbers=range(4)):
    """Writes the shards of ranks 0 to 3 (2 tensor x 2 data)."""
    for number in numbers:
        data, tensor = divmod(number, 2)
        pieces, places = {}, {}
        for name, cut in CUTS.items():
            start, stop = (0, AT[name][0]) if data == 0 else (AT[name][0], torch.Size(cut.part_shape).numel())
            if start == stop or (cut.dim is None and tensor):
                continue
            places[name] = (tensor if cut.dim is not None else 0, start)
            for kind in KINDS:
                whole = value(kind, name)
                part = whole if cut.dim is None else whole.chunk(2, cut.dim)[tensor]
                pieces[f"{kind}.{name}"] = part.flatten()[start:stop].clone()
        write_shard(checkpoints.unfinished(folder, step), number, pieces, places)


def save(folder, step=5):
    write(folder, step)
    return checkpoints.join(folder, 4, CUTS, replace(STATE, step=step), lambda: False)


def check(path):
    with checkpoints.Tensors(path) as tensors:
        assert tensors.shapes() == {name: tuple(whole.shape) for name, whole in WHOLE.items()}
        for kind in KINDS:
            for name in WHOLE:
                assert torch.equal(tensors.get(kind, name), value(kind, name)), (kind, name)
                for cut in (CUTS[name], Whole(tuple(WHOLE[name].shape)), Whole(tuple(WHOLE[name].shape), 0, 1)):
                    part = value(kind, name).chunk(cut.parts, cut.dim or 0)[-1].flatten()
                    assert torch.equal(tensors.span(kind, name, cut, cut.parts - 1, 1, 5), part[1:5])


def test_a_study_records_a_hash_of_shards(tmp_path):
    path = save(tmp_path)
    assert weights_hash(path) == checkpoints.checkpoint_hash(path)


@pytest.mark.parametrize("shape, dim, parts", [((5, 3), 0, 2), ((3, 5), 1, 2), ((5, 2), 0, 4), ((1, 2), 0, 4)])
def test_parts_that_do_not_divide_end_in_zeros_that_are_left_out_again(shape, dim, parts):
    whole, cut = torch.randn(shape), Whole(shape, dim, parts)
    pieces = [cut.part(whole, number) for number in range(parts)]
    assert {tuple(piece.shape) for piece in pieces} == {cut.part_shape}
    assert torch.equal(cut.join(pieces), whole)
    rest = torch.cat(pieces, dim).narrow(dim, shape[dim], parts * cut.part_shape[dim] - shape[dim])
    assert not rest.any()


def test_any_ranks_read_what_others_wrote(tmp_path):
    path = save(tmp_path)
    assert checkpoints.verify(path) == []
    assert checkpoints.newest_complete(tmp_path) == path
    assert checkpoints.read_state(path) == STATE
    check(path)


def test_it_waits_for_the_last_rank(tmp_path):
    write(tmp_path, numbers=(0, 1, 3))
    late = threading.Timer(0.2, write, [tmp_path, 5, (2,)])
    late.start()
    check(checkpoints.join(tmp_path, 4, CUTS, STATE, lambda: False))
    late.join()


def test_a_rank_that_failed_leaves_nothing(tmp_path):
    good = save(tmp_path, 4)
    write(tmp_path, numbers=(0, 1, 3))
    asked = iter([False, False, True])
    assert checkpoints.join(tmp_path, 4, CUTS, STATE, lambda: next(asked)) is None
    assert list(tmp_path.iterdir()) == [good]


def test_only_what_is_asked_for_is_read(tmp_path):
    path = save(tmp_path)
    for number in (1, 3):
        os.remove(path / shard_file(number))
    with ShardReader(path) as reader:
        part = value("exp_avg", "a").chunk(2, 0)[0].flatten()
        assert torch.equal(reader.span("exp_avg", "a", 0, 3, 9), part[3:9])
        with pytest.raises(FileNotFoundError):
            reader.whole("exp_avg", "a")


def test_a_gap_is_no_tensor(tmp_path):
    path = save(tmp_path)
    (path / shard_file(2, "json")).unlink()
    with ShardReader(path) as reader, pytest.raises(ValueError, match="weight.a has 17 of 24|has 5 of 12 numbers"):
        reader.whole("weight", "a")


@pytest.mark.parametrize("name", [shard_file(2), shard_file(2, "json"), "tensors.json", "trainer.json"])
def test_a_damaged_shard_is_noticed(tmp_path, name):
    path = save(tmp_path)
    os.truncate(path / name, (path / name).stat().st_size - 1)
    assert checkpoints.verify(path)[0].startswith(name)


def test_shards_become_whole_tensors(tmp_path, capsys):
    path = save(tmp_path / "checkpoints")
    assert cli.run(["checkpoint", "list", str(tmp_path)]) == 0
    assert "format 2" in capsys.readouterr().out
    before = checkpoints.checkpoint_hash(path)
    assert cli.run(["checkpoint", "merge", str(tmp_path), "--checkpoint", "5"]) == 0
    assert "whole tensors now" in capsys.readouterr().out
    names = {file.name for file in path.iterdir()}
    assert names == {checkpoints.MODEL, checkpoints.OPTIMIZER, checkpoints.TRAINER, checkpoints.MANIFEST}
    assert checkpoints.verify(path) == []
    check(path)
    assert checkpoints.checkpoint_hash(path) == before, "states and results still belong to it"
    assert cli.run(["checkpoint", "merge", str(tmp_path)]) == 0
    assert "holds whole tensors already" in capsys.readouterr().out


def test_a_rank_opens_the_files_that_hold_its_part_alone(tmp_path):
    """A thousand ranks that each open the files of all others would keep their file system busy for minutes."""
    numbers, cut = torch.randn(40), Whole((40,))
    for rank in (2, 0, 3, 1):
        pieces = {f"{kind}.c": numbers[10 * rank :][:10].clone() for kind in KINDS}
        write_shard(checkpoints.unfinished(tmp_path, 5), rank, pieces, {"c": (0, 10 * rank)})
    path = checkpoints.join(tmp_path, 4, {"c": cut}, STATE, lambda: False)
    with ShardReader(path) as reader:
        assert torch.equal(reader.span("exp_avg", "c", 0, 22, 30), numbers[22:30])
        assert set(reader._files) == {path / shard_file(2)}
        assert reader.keys() == {f"{kind}.c" for kind in KINDS}
        assert set(reader._files) == {path / shard_file(2), path / shard_file(0)}
        assert torch.equal(reader.span("exp_avg", "c", 0, 9, 31), numbers[9:31])
