import json

import pyarrow
import pytest
from pyarrow import parquet

from tests.data_pipeline.small_corpus import write_jsonl
from titans_pt import cli
from titans_pt.data_pipeline import TokenFiles, merge, parts
from titans_pt.data_pipeline.inspection import document_place, inspect_data
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import UserError


def test_totals_lengths_and_documents(config, capsys):
    manifest = prepare(config())
    inspect_data(config(), documents=2, verify=True)
    out = capsys.readouterr().out
    train = manifest["splits"]["train"]
    assert f"train: {train['documents']:,} documents, {train['tokens']:,} tokens" in out
    assert "dropped: 0 empty, 0 duplicate, 0 filtered, 0 rejected" in out
    assert "document 0 of train: " in out and "corpus.jsonl byte 0 id -" in out and "'Document 0 0\\n" in out
    assert "train.bin: " in out and "checksum correct" in out
    histogram = out.split("; by tokens:\n")[1].split("  document ")[0]
    counts = [int(line.split()[3].replace(",", "")) for line in histogram.splitlines()]
    assert sum(counts) == train["documents"] and counts[0] > 0 and counts[-1] > 0


def test_pyarrow_opens_lists_of_documents_itself(config, monkeypatch):
    """Threads of pyarrow that release a file of Python while the interpreter ends abort the process."""
    opened, whole = [], parquet.ParquetFile

    def spied(source, *args, **keywords):
        opened.append(source)
        return whole(source, *args, **keywords)

    monkeypatch.setattr(parquet, "ParquetFile", spied)
    prepare(config())
    assert opened
    inspect_data(config(), sample=0)
    assert all(isinstance(source, pyarrow.NativeFile) for source in opened), opened


def test_what_a_sample_contains(config, capsys, corpus):
    """The shown text is the sample's text, and the shown place is its place in the corpus."""
    prepare(config())
    files = TokenFiles.open(config())
    samples = files.samples(config())
    for position in (0, 5, len(samples) + 3):
        inspect_data(config(), sample=position)
        shown = capsys.readouterr().out.splitlines()
        found = samples.describe(position)
        assert shown[0] == (
            f"sample {position}: {found['file']} epoch {found['epoch']} sample {found['sample']}, "
            f"tokens {found['tokens'][0]} to {found['tokens'][1] - 1}"
        )
        first, last = found["documents"]
        assert len(shown) == 2 + last - first
        for line, j in zip(shown[1:], range(first, last + 1), strict=True):
            place = document_place(files.train[0], j)
            assert f"document {j} of train: {corpus} byte {place['row']} " in line
        start, stop = found["tokens"]
        ids = files.train[0].read(max(start, files.train[0].document_starts[last]), stop)
        assert repr(files.tokenizer.decode(ids.tolist())[:100])[:-1] in shown[-1]


def test_the_batch_of_a_step(config, capsys):
    prepare(config())
    inspect_data(config(), step=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sample ")]
    assert [line.split(":")[0] for line in lines] == [f"sample {i}" for i in range(16, 24)]


def test_every_changed_file_is_found(config, tmp_path, capsys):
    manifest = prepare(config())
    files = sorted(manifest["files"])
    assert len(files) == 9
    for name in files:
        path = tmp_path / "data" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        capsys.readouterr()
        with pytest.raises(UserError, match=f"{name}: its checksum is not that of the manifest; copy it again, or"):
            inspect_data(config(), verify=True)
        out = capsys.readouterr().out
        assert out.count("checksum correct") == 8 and f"{name}: its checksum is not that" in out
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match=f"{name}: {len(content) - 1:,} bytes, written with {len(content):,}; "):
            inspect_data(config(), verify=True)
        path.unlink()
        with pytest.raises(UserError, match=f"{name}: No such file"):
            inspect_data(config(), verify=True)
        path.write_bytes(content)
    (tmp_path / "data" / "train.bin").write_bytes(b"")
    (tmp_path / "data" / "validation.idx").unlink()
    with pytest.raises(UserError, match=r"\(2 files are damaged: train.bin, validation.idx\)"):
        inspect_data(config(), verify=True)


def test_a_damaged_list_of_documents_is_one_line(config, tmp_path):
    prepare(config())
    path = tmp_path / "data" / "train.documents.parquet"
    content = path.read_bytes()
    for damaged in (b"", bytes(len(content)), content[:-20], b"no table", content.replace(b"row", b"roW")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="train.documents.parquet: damaged .*; copy it again, or make the token"):
            inspect_data(config())
    path.write_bytes((tmp_path / "data" / "validation.documents.parquet").read_bytes())
    with pytest.raises(UserError, match="train.documents.parquet: truncated, or of another run; copy it again"):
        inspect_data(config(), documents=10**6)


def test_a_list_of_documents_in_row_groups(config, monkeypatch):
    """Documents are gathered in batches, and listed in groups: neither changes what is written and found."""
    whole = prepare(config())
    places = [document_place(TokenFiles.open(config()).train[0], j) for j in range(20)]
    monkeypatch.setattr(parts, "_BATCH_CHARACTERS", 300)
    for module in (parts, merge):
        monkeypatch.setattr(module, "ROW_GROUP", 7)
    assert prepare(config(), force=True)["content"] == whole["content"]
    stream = TokenFiles.open(config()).train[0]
    assert parquet.ParquetFile(stream.list_of_documents).num_row_groups > 2
    assert [document_place(stream, j) for j in range(20)] == places


def test_the_epochs_of_a_mixture(config, corpus, tmp_path, texts, capsys):
    other = write_jsonl(tmp_path / "other.jsonl", [f"other {text}" for text in texts])
    sources = [{"kind": "files", "path": str(p), "weight": w} for p, w in ((corpus, 3), (other, 1))]
    given = config(data={"sources": sources})
    prepare(given)
    inspect_data(given)
    per_epoch = [len(stream) for stream in TokenFiles.open(given).samples(given).streams]
    lines = [line for line in capsys.readouterr().out.splitlines() if "epochs in train.max_steps" in line]
    for line, share, count in zip(lines, (0.75, 0.25), per_epoch, strict=True):
        epochs = share * given.train.max_steps * 8 / count
        assert f": {share:.1%} of samples, {count:,} per epoch, {epochs:.2f} epochs in" in line


def test_prepare_sees_files_that_are_cut_or_gone(config, tmp_path):
    prepare(config())
    path = tmp_path / "data" / "validation.idx"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="validation.idx: .* bytes, written with .*titans prepare CONFIG --force"):
        prepare(config())
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="validation.idx: is a folder, .*titans prepare CONFIG --force"):
        prepare(config())
    prepare(config(), force=True)
    inspect_data(config(), verify=True)


def test_what_has_no_checksum_is_told(config, tmp_path, capsys):
    """The manifest is as earlier versions wrote it: checksums of the tokens only."""
    manifest = prepare(config())
    old = {name: manifest["files"][name] for name in ("train.bin", "validation.bin")}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest | {"files": old}))
    capsys.readouterr()
    inspect_data(config(), verify=True)
    out = capsys.readouterr().out
    assert out.count("checksum correct") == 2
    assert "train.idx: not in manifest.json, and has no checksum" in out


def test_commands(config, tmp_path, capsys):
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config().model_dump(mode="json")))
    assert cli.run(["prepare", str(path), "--shard", "0/2", "--workers", "1"]) == 0
    assert "shard 0 of 2" in capsys.readouterr().err
    assert cli.run(["data", "inspect", str(path)]) == 2
    assert "no token files" in capsys.readouterr().err
    assert cli.run(["prepare", str(path), "--workers", "1"]) == 0
    capsys.readouterr()
    assert cli.run(["data", "inspect", str(path), "--sample", "2", "--count", "3", "data.seq_len=32"]) == 0
    assert capsys.readouterr().out.count("sample ") >= 3
    for words in (
        ["prepare", str(path), "--shard", "2/2"],
        ["prepare", str(path), "--workers", "0"],
        ["data", "inspect", str(path), "--step", "0"],
        ["data", "inspect"],
        ["data"],
        ["data", "inspect", str(path), "--step", "1", "--sample", "1"],
    ):
        assert cli.run(words) == 2
        assert capsys.readouterr().err.startswith("titans: error: ")


def test_a_language_task_of_ones_own(config, tmp_path, capsys, monkeypatch):
    import yaml

    (tmp_path / "own_language.py").write_text(
        "from titans_pt.tasks.base import TASKS\nfrom titans_pt.tasks.language import Language\n\n"
        "@TASKS.register\nclass Own(Language):\n    name = 'own_language'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config().model_dump(mode="json")))
    assert cli.run(["prepare", str(path), "--workers", "1"]) == 0
    words = ["run.imports=[own_language]", "task=own_language"]
    assert cli.run(["data", "inspect", str(path), *words]) == 0
    assert "tokens" in capsys.readouterr().out


def test_a_task_without_token_files_is_told(capsys):
    assert cli.run(["data", "inspect", "recall"]) == 2
    assert (
        "task: given 'recall', which reads no token files to inspect; name a config of task=language"
        in capsys.readouterr().err
    )
