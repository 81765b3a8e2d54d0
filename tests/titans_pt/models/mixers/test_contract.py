"""A mixer is one file: the mixer defined here does all that built-in mixers do, without changes elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.processes import curve, run_jobs
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import ModelConfig, Section
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard
from titans_pt.models import build_model
from titans_pt.models.backbone import check_packages, exempt_from_decay
from titans_pt.models.mixers.base import MIXERS, Mixer
from titans_pt.parallel import RankGroup, TensorParallel
from titans_pt.runs.loaded import load_run
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

HERE = ".".join(Path(__file__).with_suffix("").parts[-5:])  # tests.titans_pt.models.mixers.test_contract
T = 23


@dataclass
class LeakyState:
    """State of Leaky; mean: (B, H, D)."""

    mean: Tensor


@MIXERS.register
class Leaky(Mixer):
    """out(gain * m_t), m_t = a m_{t-1} + (1 - a) value(x_t): a leaky mean with a learned rate per channel."""

    name = "leaky"

    class Settings(Section):
        gain: Annotated[float, Field(gt=0.0)] = 1.0

    sharding = {"value": Shard.ENTER_COLUMN, "rate": Shard.COLUMN, "out": Shard.LAST_ROW}
    per_rank = ("n_heads",)
    no_decay = ("rate",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads, self.gain = config.n_heads, self.settings(config).gain
        self.value = nn.Linear(config.d_model, config.d_model)
        self.rate = nn.Parameter(torch.zeros(config.n_heads, config.d_model // config.n_heads))
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def own_initialisation(self):
        nn.init.constant_(self.value.bias, 0.25)

    def forward(self, x, state=None, documents=None):
        value, a = self.value(x).unflatten(-1, (self.n_heads, -1)), torch.sigmoid(self.rate)
        mean, means = state.mean.to(value) if state else torch.zeros_like(value[:, 0]), []
        for t, new in enumerate(value.unbind(1)):
            if documents is not None:
                mean = mean.masked_fill(documents.starts[:, t, None, None], 0.0)
            mean = a * mean + (1 - a) * new
            means.append(mean)
        return self.out(self.gain * torch.stack(means, 1).flatten(-2)), LeakyState(mean)

    def flops(self, length):
        d = self.out.in_features
        return 2 * product(d, d) if length else Flops(0, 0)


@MIXERS.register
class Silent(Leaky):
    """Leaky without a declaration for tensor ranks."""

    name = "silent"
    sharding = None


@MIXERS.register
class Forgetful(Leaky):
    """Leaky with a parameter that its sharding does not name."""

    name = "forgetful"
    sharding = {"value": Shard.ENTER_COLUMN, "out": Shard.LAST_ROW}


SIZE = {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "mlp_hidden": 24}
IMPORTS = f"run.imports=[{HERE}]"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model(ModelConfig(mixers=["leaky"], **SIZE)).double().eval()


def ids(rows=2):
    return torch.randint(0, 50, (rows, T), generator=torch.Generator().manual_seed(0))


def test_its_own_settings(tiny):
    config = load_config(tiny(), ["model.mixers=[leaky]", "model.leaky.gain=2.0"])
    assert config.model.section("leaky") == {"gain": 2.0}
    assert build_model(config.model).blocks[0].mixer.gain == 2.0
    assert load_config(tiny(), ["model.mixers=[leaky]"]).model.section("leaky") == {"gain": 1.0}, "resolved"
    assert load_config(tiny(), ["model.leaky.gain=2.0"]).model.section("leaky") == {}, "not used, not kept"
    for override, message in {
        "model.leaky.gain=0.0": "model.leaky.gain: given 0.0; allowed: greater than 0",
        "model.leaky.gian=1.0": "model.leaky.gian: unknown key .*; nearest known key: model.leaky.gain",
        "model.leaki.gain=1.0": "model.leaki: unknown key .*; nearest known key: model.leaky",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(tiny(), [override])


def test_it_streams_and_resets(model):
    whole, _ = model(ids())
    parts, state = [], None
    for piece in ids().split([1, 9, 13], dim=1):
        logits, state = model(piece, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, 10] = True
    torch.testing.assert_close(model(ids(), reset=reset)[0][:, 10:], model(ids()[:, 10:])[0], rtol=1e-12, atol=1e-12)


def test_its_state_is_kept_in_a_file(model, tmp_path):
    _, state = model(ids())
    save_state(state, tmp_path / "state")
    assert torch.equal(load_state(tmp_path / "state").blocks[1].mean, state.blocks[1].mean)


def test_what_it_declares_is_what_is_done(model):
    exempt = exempt_from_decay(model)
    assert {"blocks.0.mixer.rate", "blocks.0.mixer.value.bias"} <= exempt
    assert "blocks.0.mixer.value.weight" not in exempt
    assert (model.blocks[0].mixer.value.bias == 0.25).all()
    inner, last = (getattr(model.blocks[0].mixer, name).weight.detach().std() for name in ("value", "out"))
    assert float(last / inner) == pytest.approx(0.5, rel=0.2), "the end of a residual branch, sqrt(2 n_layers)"


def test_its_flops(model):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids())
    assert counter.get_total_flops() == 2 * T * model.flops(T).forward


def test_it_is_planned(tiny):
    words = ["model.mixers=[leaky]"]
    one, two = (make_plan(task_of(load_config(tiny(), [*words, f"parallel.tensor={n}"])), n) for n in (1, 2))
    assert 0 < two.bytes["activations"] < one.bytes["activations"]
    assert two.bytes["parameters"] < one.bytes["parameters"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_it_is_compiled(model, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **options: compile(part, backend="aot_eager", **options))
    expected, _ = model(ids(), output_final_state=False)
    model.blocks.set_compiled(True)
    torch.testing.assert_close(model(ids(), output_final_state=False)[0], expected)


def test_what_it_needs_on_a_gpu(model, monkeypatch):
    monkeypatch.setattr(Leaky, "needs", lambda self: {"torch": "install it", "no_such_package": "install it"})
    check_packages(model.blocks, torch.device("cpu"))
    with pytest.raises(UserError, match="model.mixers: 'leaky' needs no_such_package on a GPU; install it"):
        check_packages(model.blocks, torch.device("cuda"))


def test_without_a_declaration_tensor_ranks_are_refused_by_name(tiny):
    with pytest.raises(UserError, match="the mixer 'silent' does not say how it is cut over tensor ranks"):
        load_config(tiny(), ["model.mixers=[silent]", "parallel.tensor=2"])
    with pytest.raises(TypeError, match="Forgetful.sharding names 'rate' .* nowhere"):
        TensorParallel(build_model(ModelConfig(mixers=["forgetful"], **SIZE)), RankGroup(0, 2))


@pytest.mark.thorough
def test_it_trains_under_tensor_parallelism_and_zero(tiny, tmp_path):
    """Two tensor ranks under ZeRO 2 give the losses of one process; their checkpoint is evaluated and exported."""
    config = tiny(model={"mixers": ["leaky"]}, run={"imports": [HERE]})
    run_jobs(1, config, tmp_path, {"one": []})
    run_jobs(2, config, tmp_path, {"two": ["parallel.tensor=2", "parallel.zero_stage=2"]})
    one, two = (curve(tmp_path / name, "loss", "grad_norm") for name in ("one", "two"))
    assert len(one) == 10 and one[-1][1] < one[0][1]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    run = load_run(tmp_path / "two")
    assert run.model(ids() % 50)[0].isfinite().all()
    assert cli.run(["export", str(tmp_path / "two"), "--out", str(tmp_path / "hub")]) == 0
    assert cli.run(["import", str(tmp_path / "hub"), "--out", str(tmp_path / "back")]) == 0
    torch.testing.assert_close(load_run(tmp_path / "back").model(ids())[0], run.model(ids())[0], rtol=0, atol=0)


def test_a_run_of_it_generates(prepared, tmp_path, capsys):
    run = untrained_run(tmp_path / "run", prepared, mixers=["leaky"])
    assert cli.run(["generate", str(run), "--prompt", "abc", "--max-new-tokens", "4"]) == 0
    assert "4 new tokens" in capsys.readouterr().err
