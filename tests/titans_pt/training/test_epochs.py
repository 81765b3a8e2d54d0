import pytest

from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.tasks import TaskData
from titans_pt.tasks.language import Language
from titans_pt.training.epochs import epochs_text, repeated


def data(train, validation=9, **sources):
    return TaskData(range(train), range(validation), {}, None, sources)


@pytest.fixture
def config(tiny):
    """A step reads 64 samples of 16 tokens."""

    def load(**changes):
        train = {"batch_tokens": 64 * 16, "max_steps": 100, "eval_every": 5} | changes.pop("train", {})
        return load_config(tiny(train=train, **changes))

    return load


def test_the_plan_says_epochs(config):
    assert epochs_text(config(), data(640)) == (
        "plan: the training data: 640 samples of 16 tokens; 100 steps read 6,400, each 10.00 times (epochs)\n"
        "plan: validation reads 5 of 9 samples"
    )
    assert repeated(config(), data(64)) == []


def test_a_step_larger_than_an_epoch_is_a_warning(config):
    [warning] = repeated(config(), data(3))
    assert warning == (
        "train.batch_tokens=1024: a step reads 64 samples of the training data, and an epoch has 3: every step repeats "
        "each of them 21.3 times; lower train.batch_tokens to at most 48 (data.seq_len=16), or add text in data.sources"
    )
    assert repeated(config(train={"batch_tokens": 48}), data(3)) == []
    assert len(repeated(config(train={"batch_tokens": 64}), data(3))) == 1


def test_each_source_of_a_mixture(config):
    mixed = data(1003, books=(1000, 0.75), notes=(3, 0.25))
    assert epochs_text(config(), mixed).splitlines()[:2] == [
        "plan: books: 1,000 samples of 16 tokens; 100 steps read 4,800, each 4.80 times (epochs)",
        "plan: notes: 3 samples of 16 tokens; 100 steps read 1,600, each 533.33 times (epochs)",
    ]
    [warning] = repeated(config(), mixed)
    assert "a step reads 16 samples of notes, and an epoch has 3" in warning and "lower its weight" in warning


def test_fewer_validation_samples_than_asked_for(config):
    assert epochs_text(config(), data(640, validation=2)).endswith(
        "\nplan: validation reads all 2 samples there are (train.eval_samples=5)"
    )
    assert "validation" not in epochs_text(config(train={"eval_every": 0}), data(640, validation=2))


def test_a_run_of_language_names_its_sources(tiny, prepared, tmp_path):
    from titans_pt.data_pipeline.prepare import prepare

    text = str(prepared.parent / "text.jsonl")
    (tmp_path / "more.jsonl").write_text("".join(f'{{"text": "{"word " * 40}{n}"}}\n' for n in range(20)))
    sources = [
        {"kind": "files", "path": text, "weight": 3},
        {"kind": "files", "path": str(tmp_path / "more.jsonl"), "weight": 1},
    ]
    config = load_config(tiny(data={"dir": str(tmp_path / "data"), "sources": sources}))
    prepare(config)
    opened = Language(config).open()
    assert [name.partition(" ")[0] for name in opened.sources] == ["data.sources[0]", "data.sources[1]"]
    assert [share for _, share in opened.sources.values()] == [0.75, 0.25]
    assert sum(samples for samples, _ in opened.sources.values()) == len(opened.train)


@pytest.mark.usefixtures("one_group")
def test_other_weights_do_not_continue(tiny, prepared, tmp_path):
    from titans_pt.data_pipeline.prepare import prepare
    from titans_pt.training import loop

    def load(*weights):
        path = str(prepared.parent / "text.jsonl")
        (tmp_path / "more.jsonl").write_text("".join(f'{{"text": "{"word " * 40}{n}"}}\n' for n in range(20)))
        sources = [{"kind": "files", "path": p, "weight": w}
                   for p, w in zip((path, str(tmp_path / "more.jsonl")), weights, strict=True)]  # fmt: skip
        data = {"dir": str(tmp_path / "data"), "sources": sources}
        return load_config(tiny(data=data, train={"max_steps": 2, "warmup_steps": 0, "eval_every": 0}))

    prepare(load(3, 1))
    assert loop.train(load(3, 1)) == 0
    with pytest.raises(UserError, match=r"data.sources: given the weights \[1.0, 1.0\], but .* with \[3.0, 1.0\]"):
        loop.train(load(1, 1))


def test_the_command_with_and_without_data(tiny, tmp_path, capsys):
    assert cli.run(["plan", str(tiny()), "train.batch_tokens=65536", "train.micro_batch=64"]) == 0
    out = capsys.readouterr().out
    assert "plan: the training data: " in out and "plan: warning: train.batch_tokens=65536: a step reads 4,096" in out
    assert cli.run(["plan", str(tiny(data={"dir": str(tmp_path / "none")}))]) == 0
    assert "plan: how often the data is read is not known: data.dir=" in capsys.readouterr().out
