"""FASTA through `titans prepare`, and the other strand in training."""

import numpy as np
import pytest

from titans_pt.config import Config
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import TokenFiles, documents
from titans_pt.data_pipeline.inspection import inspect_data
from titans_pt.data_pipeline.packing import PackedSamples, on_other_strand
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import UserError
from titans_pt.tasks import task_of


def config(folder, text, /, **changes) -> Config:
    (folder / "fa").mkdir(exist_ok=True)
    (folder / "fa" / "g.fa").write_text(text)
    data = {"dir": str(folder / "data"), "sources": [{"kind": "fasta", "path": str(folder / "fa"), "block": 64}],
            "tokenizer": {"kind": "nucleotides"}, "validation_fraction": 0.2, "seq_len": 32} | changes  # fmt: skip
    return Config.model_validate({"data": data, "model": {"vocab_size": 12}})


@pytest.fixture(scope="module")
def genome() -> str:
    return "".join(np.random.default_rng(0).choice(list("ACGT"), 64 * 60 - 10))


def test_prepared(tmp_path, genome, capsys):
    text = f">a one\n{genome[:100]}\n{genome[100:].lower()}\n>none\n>b\n{'N' * 64}{'RY' * 4}{'ACGT' * 4}\n"
    (tmp_path / "fa").mkdir()
    (tmp_path / "fa" / "notes.md").write_text("no sequence")
    given = config(tmp_path, text)
    manifest = prepare(given)
    assert manifest["letters"] == {"N": 64, "R": 4, "Y": 4} and manifest["ignored"]["files"] == [
        str(tmp_path / "fa" / "notes.md")
    ]
    assert manifest["dropped"]["empty"] == 2, "the record without a sequence, and the block of N"
    assert manifest["round_trip"]["tried"] == manifest["round_trip"]["equal"] == 61
    told = capsys.readouterr().err
    assert "letters other than A, C, G, T, all read as N: 64 N, 4 R, 4 Y" in told and "WARNING" not in told
    assert manifest["markov"]["loss"] < 1.45 and "floor: " in told
    files = TokenFiles.open(given)
    blocks = [genome[i : i + 64] for i in range(0, len(genome), 64)] + ["N" * 8 + "ACGT" * 4]
    read = [files.tokenizer.decode(stream.document(j)) for stream in (*files.train, files.validation)
            for j in range(len(stream.document_starts))]  # fmt: skip
    assert sorted(read) == sorted(blocks)
    assert prepare(given) == manifest, "nothing to do"
    with pytest.raises(UserError, match="data.tokenizer: made with"):
        TokenFiles.open(given.model_copy(update={"data": given.data.model_copy(update={
            "tokenizer": given.data.tokenizer.model_copy(update={"kind": "text"})})}))  # fmt: skip


def test_masked_bases_cost_the_chain_of_the_training_curve_nothing(tmp_path, genome):
    """A model's loss is a mean over all tokens: where half of them are N, it is half the loss of the bases."""
    masked = "".join(genome[i : i + 32] + "N" * 32 for i in range(0, 64 * 59, 64))
    given = config(tmp_path, f">a\n{masked}\n")
    chain = prepare(given)["markov"]
    blocks = len(TokenFiles.open(given).validation.document_starts)
    assert (chain["bases"], chain["tokens"]) == (32 * blocks, 65 * blocks)
    assert task_of(given).open().baseline == pytest.approx(chain["loss"] * 32 / 65)


@pytest.mark.parametrize("text, message", [
    (">p\nMKLVEF\n", r"data.sources: .*g.fa:1, record 'p': looks like a protein: .*; name a file of nucleotides"),
    ("ACGT", "no FASTA but text without a header line"),
])  # fmt: skip
def test_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as error:
        prepare(config(tmp_path, text))
    assert "\n" not in str(error.value)


def test_what_is_no_fasta_can_be_skipped(tmp_path):
    (source,) = config(tmp_path, ">a\nACGT\n").data.sources
    (tmp_path / "fa" / "a.fa").write_text("ACGT")
    (tmp_path / "fa" / "gone.fa").symlink_to("nowhere")
    rejected = []
    assert [document.text for document in documents(source, reject=rejected.append)] == ["ACGT"]
    assert [each.reason.partition(" (")[0] for each in rejected] == [
        "no FASTA but text without a header line", "a link to nowhere, which cannot be followed"
    ]  # fmt: skip
    with pytest.raises(UserError, match="fa/a.fa:1: no FASTA .*; begin it with a line '>NAME', or set data.bad_input="):
        list(documents(source))


def test_settings_that_do_not_go_together(tmp_path):
    for words, message in {
        ("data.sources=[{kind: fasta, path: a.fa}]",): "data.sources.0.kind: given 'fasta', whose sequences need "
        "data.tokenizer.kind=nucleotides; it is 'text'",
        ("data.validation_sources=[{kind: fasta, path: a.fa}]",): "data.validation_sources.0.kind: given 'fasta'",
        (
            "data.sources=[{kind: genome, name: mouse}]",
            "data.tokenizer.kind=nucleotides",
        ): "allowed: ecoli, worm-x, human-x",
        ("data.sources=[{kind: stdlib, block: 5}]",): "block: given 5 with kind='stdlib', which does not use it",
        ("data.reverse_complement=true",): "only with data.tokenizer.kind=nucleotides",
        ("data.tokenizer.kind=nucleotides", "data.tokenizer.path=a.json"): "given 'a.json' with kind='nucleotides'",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config("quickstart", words)
    small = Config.model_validate({"data": {"dir": str(tmp_path), "tokenizer": {"kind": "nucleotides"}},
                                   "model": {"vocab_size": 8}})  # fmt: skip
    with pytest.raises(UserError, match="model.vocab_size: given 8, but data.tokenizer.kind=nucleotides has 12"):
        prepare(small)


def test_the_other_strand(tmp_path, genome):
    """Half of the training samples are reversed, chosen by (seed, position) alone; resets follow that direction."""
    given = config(tmp_path, f">a\n{genome}\n", reverse_complement=True)
    prepare(given)
    files = TokenFiles.open(given)
    samples, eos = files.samples(given), files.tokenizer.eos_id
    plain = PackedSamples(samples.dataset, 32, given.run.seed)
    turned = 0
    for position in range(2 * len(samples)):
        (ids, reset), (as_read, begins) = samples.sample(position), plain.sample(position)
        assert samples.describe(position).get("other_strand", False) == on_other_strand(given.run.seed, position)
        if on_other_strand(given.run.seed, position):
            turned += 1
            assert np.array_equal(ids, files.tokenizer.complement[as_read[::-1]])
            assert np.array_equal(reset[1:], ids[:-2] == eos)
            start = plain.index(position) * 32
            behind = samples.dataset.read(start + 33, min(start + 34, samples.dataset.tokens))
            assert reset[0] == (len(behind) > 0 and behind[0] == eos)
        else:
            assert np.array_equal(ids, as_read) and np.array_equal(reset, begins)
    assert 0.4 < turned / (2 * len(samples)) < 0.6
    validation = files.validation_samples(given)
    assert validation.complement is None and "other_strand" not in validation.describe(0)


@pytest.mark.parametrize("weights", [(None,), (0.7, 0.3)])
def test_a_sample_is_shown_as_it_is_read(tmp_path, genome, capsys, weights):
    """Documents in reading order give the whole sample; in a mixture, the sample's stream decides the strand."""
    given = config(tmp_path, f">a\n{genome}\n", reverse_complement=True, seq_len=128, sources=[
        {"kind": "fasta", "path": str(tmp_path / "fa"), "block": block, "weight": weight}
        for block, weight in zip((64, 50), weights, strict=False)])  # fmt: skip
    prepare(given)
    files, strands = TokenFiles.open(given), []
    samples = files.samples(given)
    for position in range(20):
        capsys.readouterr()
        inspect_data(given, sample=position)
        title, *lines = capsys.readouterr().out.splitlines()
        strands.append("other_strand" in samples.describe(position))
        assert title.endswith(", read backwards from the other strand") == strands[-1]
        shown = "".join(line.rsplit("'", 2)[1] for line in lines)
        assert shown == files.tokenizer.decode(samples.sample(position)[0].tolist())
        first, last = samples.describe(position)["documents"]
        named = [int(line.split()[1]) for line in lines]
        assert named == sorted(range(first, last + 1), reverse=strands[-1])
    assert 0 < sum(strands) < 20
