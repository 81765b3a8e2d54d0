"""Expectations that transformers and its users have of a model.

The tests are of the kinds that transformers has for models, generation and tokenizers, where they apply to a model
whose past is a state.
"""

import copy
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers import pipeline as hf_pipeline

from tests.helpers.mixers import EVERY
from tests.helpers.untrained import untrained_run
from titans_pt import huggingface
from titans_pt.errors import UserError
from titans_pt.layers.state import tensors
from titans_pt.runs.loaded import load_run


def log_p(model, ids, prompt: int):
    """Log-likelihood (B,) of the tokens after the first ``prompt``, all read at once."""
    with torch.no_grad():
        logits = model(ids).logits.log_softmax(-1)
    return logits[:, :-1].gather(2, ids[:, 1:, None])[:, prompt - 1 :, 0].sum(1)


def beams(model, ids, new=7, **options):
    return model.generate(ids, num_beams=3, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                          return_dict_in_generate=True, output_scores=True, **options)  # fmt: skip


# ----- generate


CACHED = {"memory": {"chunk_size": 2, "caching": {"segment": 2, "slots": 3}}}


@pytest.mark.parametrize("mixer", [*EVERY, "lmm+caching"])
def test_beams_are_as_likely_as_they_say(mixer, tmp_path, prepared, ids):
    """A state that is not reordered with its beams would give scores above the sequences' likelihood.

    Two continuations of one state agree: nothing writes into it.
    """
    name, _, caching = mixer.partition("+")
    run = untrained_run(tmp_path / "run", prepared, mixers=[name], **(CACHED if caching else {}))
    huggingface.export_run(run, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        found = beams(model, ids, num_return_sequences=2)
        torch.testing.assert_close(found.sequences_scores * 7, log_p(model, found.sequences, 13), atol=2e-3, rtol=0)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0  # rows of different lengths have another form of state
        padded = beams(model, ids, attention_mask=mask).sequences[0, 13:]
        assert torch.equal(padded, beams(model, ids[:1, 5:]).sequences[0, 8:])
        state = model(ids[:, :6]).state
        ways = [model.generate(ids[:, 6:], state=state, max_new_tokens=6, do_sample=False) for _ in range(2)]
    assert torch.equal(*ways)


def test_a_state_goes_on_as_its_text_would(hub, ids):
    """Several sequences, sampled or by beams; the state by either name, or as generate() returned it."""
    with torch.no_grad():
        state = hub(ids[:, :6]).past_key_values
        for options in ({"num_return_sequences": 3, "do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}):
            found = []
            for given, before in ((ids, {}), (ids[:, 6:], {"state": state})):
                torch.manual_seed(0)
                found.append(hub.generate(given, max_new_tokens=8, **options, **before)[:, given.shape[1] :])
            assert torch.equal(*found) and len(found[0]) == 2 * options["num_return_sequences"]
        first = hub.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        more = hub.generate(first.sequences[:, -1:], state=first.past_key_values, max_new_tokens=5, do_sample=False)
        whole = hub.generate(ids, max_new_tokens=10, min_new_tokens=6, do_sample=False)
        assert torch.equal(more[:, 1:], whole[:, 18:])
        assert torch.equal(hub(ids[:, 6:], past_key_values=state).logits, hub(ids[:, 6:], state=state).logits)


LEFT = torch.tensor([[0] * 4 + [1] * 9, [1] * 13])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"attention_mask": LEFT}])
def test_without_a_cache_all_is_read_again(hub, ids, options, monkeypatch):
    expected = hub.generate(ids, max_new_tokens=6, do_sample=False, **options)
    lengths, forward = [], hub.model.forward

    def watched(x, *rest, **more):
        lengths.append(x.shape[1])
        return forward(x, *rest, **more)

    monkeypatch.setattr(hub.model, "forward", watched)
    assert torch.equal(hub.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, **options), expected)
    assert lengths == list(range(13, 19))


def test_hidden_states_scores_and_logits_of_generated_tokens(hub, ids):
    found = hub.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True,
                         output_hidden_states=True, output_scores=True, output_logits=True)  # fmt: skip
    shapes = [[tuple(x.shape) for x in step] for step in found.hidden_states]
    assert shapes == [[(2, length, 16)] * 3 for length in (13, 1, 1)]
    scores = hub.compute_transition_scores(found.sequences, found.logits, normalize_logits=True)
    torch.testing.assert_close(scores.sum(1), log_p(hub, found.sequences, 13), atol=1e-4, rtol=0)


def test_streamers_and_stops(hub, tokenizer, ids, capsys):
    whole = hub.generate(ids[:1], max_new_tokens=8, do_sample=False, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.strip() == tokenizer.decode(whole[0]).strip()

    class Third(StoppingCriteria):
        def __call__(self, found, scores, **_):
            return torch.full((len(found),), found.shape[1] >= 16)

    short = hub.generate(ids[:1], max_new_tokens=8, do_sample=False, stopping_criteria=StoppingCriteriaList([Third()]))
    assert torch.equal(short, whole[:, :16])
    piece = tokenizer.convert_ids_to_tokens(int(whole[0, 14]))
    text = tokenizer.convert_tokens_to_string([piece])
    stopped = hub.generate(ids[:1], max_new_tokens=8, do_sample=False, stop_strings=[text], tokenizer=tokenizer)
    assert stopped.shape[1] <= 15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokns": 3}, "max_new_tokns"),
        ({"past_key_values": "a state"}, "pass state="),
        ({"inputs_embeds": torch.zeros(1, 13, 16)}, "pass input_ids"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "no attention weights"),
        ({"position_ids": torch.zeros(1, 13)}, "counts tokens itself"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search needs to go back"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation needs to go back"),
        ({"assistant_model": "itself"}, "assisted generation needs to go back"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group beam search"),
        ({"attention_mask": torch.tensor([[1] * 12 + [0]])}, "pad on the left"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "input_ids: given no token; generate.. needs at least"),
        ({"input_ids": None, "state": "a state"}, "input_ids: given no token; .* pass this token with the state"),
    ],
)
def test_what_generate_does_not_do(hub, ids, options, words):
    if "assistant_model" in options:
        options = {"assistant_model": hub}
    with pytest.raises(ValueError, match=words):
        hub.generate(**{"input_ids": ids[:1], "max_new_tokens": 3, **options})


def test_pipelines(exported, hub, tokenizer):
    texts = ["abc dea", "k"]
    generate = hf_pipeline("text-generation", model=hub, tokenizer=tokenizer)
    found = [row[0]["generated_text"] for row in generate(texts, max_new_tokens=5, do_sample=False, batch_size=2)]
    for text, whole in zip(texts, found, strict=True):
        alone = hub.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=5, do_sample=False)
        assert whole == tokenizer.decode(alone[0], skip_special_tokens=True)


# ----- calls


def test_tuples_and_dictionaries_are_the_same(hub, ids):
    out = hub(ids, labels=ids, output_hidden_states=True)
    loss, logits, state, hidden = hub(ids, labels=ids, output_hidden_states=True, return_dict=False)
    assert torch.equal(out.loss, loss) and torch.equal(out.logits, logits)
    assert all(map(torch.equal, out.hidden_states, hidden))
    assert all(map(torch.equal, tensors(out.state), tensors(state)))
    assert list(hub(ids, use_cache=False)) == ["logits"]


def test_hidden_states_are_what_blocks_and_the_head_are_given(hub, ids):
    hidden = hub(ids, output_hidden_states=True).hidden_states
    x = hub.model.embedding(ids) * 4.0  # sqrt(d_model)
    for block, given in zip(hub.model.blocks, hidden, strict=False):
        assert torch.equal(given, x)
        x, _ = block(x)
    assert torch.equal(hub.model.head(hidden[-1]), hub(ids).logits)
    assert hub(ids).hidden_states is None


def test_logits_to_keep(hub, ids):
    logits = hub(ids).logits
    for keep, expected in ((1, logits[:, -1:]), (4, logits[:, -4:]), (torch.tensor([0, 5]), logits[:, [0, 5]])):
        torch.testing.assert_close(hub(ids, logits_to_keep=keep).logits, expected)
        with pytest.raises(ValueError, match="logits_to_keep: given with labels, whose loss needs all logits"):
            hub(ids, logits_to_keep=keep, labels=ids)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"output_hiden_states": True}, TypeError, "output_hiden_states: no argument"),
        ({"use_cash": False}, TypeError, "use_cash: no argument"),
        ({"output_attentions": True}, ValueError, "no attention weights"),
        ({"position_ids": torch.zeros(2, 13)}, ValueError, "position_ids: the model counts"),
        ({"input_ids": None}, ValueError, "input_ids: missing"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 13, 16)}, ValueError, "pass input_ids"),
        ({"state": "one", "past_key_values": "another"}, ValueError, "two names of one thing"),
        ({"past_key_values": DynamicCache()}, TypeError, "state: given a DynamicCache; a call changes no .* cache"),
        ({"attention_mask": torch.zeros(2, 1, 13, 13)}, ValueError, "given shape"),
        ({"attention_mask": torch.zeros(2, 5)}, ValueError, "given shape"),
    ],
)
def test_what_a_call_does_not_take(hub, ids, options, error, words):
    with pytest.raises(error, match=words):
        hub(**{"input_ids": ids, **options})
    hub(ids, output_attentions=False, position_ids=None, inputs_embeds=None)  # wrappers pass these on


def test_mixers_with_tokens_of_their_own_have_no_hidden_states(tmp_path, prepared, ids):
    huggingface.export_run(untrained_run(tmp_path / "run", prepared, mixers=["rmt"]), tmp_path / "hf")
    with pytest.raises(ValueError, match="output_hidden_states"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids, output_hidden_states=True)


def test_padding_on_either_side_is_not_read(hub, ids):
    """Padding changes neither logits nor loss; after padding on the right there is no state."""
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    alone, whole = hub(ids[:1, :9]).logits, hub(ids[1:]).logits
    right = hub(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(right.logits[:1, :9], alone)
    assert right.state is None
    left = hub(torch.cat([ids[:1, 9:], ids[:1, :9]], 1).repeat(2, 1), attention_mask=mask.flip(1))
    torch.testing.assert_close(left.logits[:1, 4:], alone)
    losses = [torch.nn.functional.cross_entropy(logits[0, :-1], labels[1:], reduction="sum")
              for logits, labels in ((alone, ids[0, :9]), (whole, ids[1]))]  # fmt: skip
    assert right.loss.item() == pytest.approx(sum(losses).item() / 20, rel=1e-5)
    with pytest.raises(ValueError, match="hides tokens at the end"):
        hub(ids, attention_mask=mask, use_cache=True)
    # With a state, the mask may also cover the tokens read before.
    state = hub(ids[:, :6]).state
    longer = torch.cat([torch.zeros(2, 2), torch.ones(2, 11)], 1)
    assert torch.equal(hub(ids[:, 6:], state=state, attention_mask=longer).logits, hub(ids[:, 6:], state=state).logits)


def test_rows_are_independent_and_calls_repeat(hub, ids):
    logits = hub(ids).logits
    assert torch.equal(hub(ids).logits, logits)
    for row in range(2):
        torch.testing.assert_close(hub(ids[row : row + 1]).logits[0], logits[row])


# ----- training


def test_labels_and_what_they_are_divided_by(hub, ids):
    """Labels of -100 do not count, whichever side is padded.

    Losses of parts, each divided by the count over all parts, add up to the loss of the whole batch.
    """
    labels = ids.clone()
    labels[0, 4:7] = -100
    logits = hub(ids).logits
    counted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert hub(ids, labels=labels).loss.item() == pytest.approx(counted.item())
    count = (labels[:, 1:] != -100).sum()
    parts = [hub(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss for i in range(2)]
    assert sum(parts).item() == pytest.approx(counted.item(), rel=1e-5)
    for mask in (torch.tensor([[0] * 5 + [1] * 8, [1] * 13]), torch.tensor([[1] * 8 + [0] * 5, [1] * 13])):
        hidden = ids.masked_fill(mask == 0, -100)
        first = int(mask[0, 0] == 0)  # a token that the Trainer counts and nothing predicts
        count = (hidden[:, 1:] != -100).sum()  # as the Trainer counts
        mean = hub(ids, attention_mask=mask, labels=hidden).loss
        rows = (
            hub(ids[i : i + 1], attention_mask=mask[i : i + 1], labels=hidden[i : i + 1], num_items_in_batch=count).loss
            for i in range(2)
        )
        assert sum(rows).item() == pytest.approx((mean * (count - first) / count).item(), rel=1e-5)
        alone = hub(ids, attention_mask=mask, labels=hidden, num_items_in_batch=count).loss
        assert alone.item() == pytest.approx(mean.item(), rel=1e-6), "all labels are in this batch"


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_gives_the_same_gradients(fresh, ids, monkeypatch):
    fresh.train()
    expected = gradients(fresh, ids)
    assert set(expected) == {name for name, _ in fresh.named_parameters()}
    fresh.gradient_checkpointing_enable()
    fresh.model.blocks.set_activation_checkpointing(True)
    ways = fresh.model.blocks.call.__globals__  # in the file that the folder carries
    calls, checkpoint = [], ways["checkpoint"]
    monkeypatch.setitem(ways, "checkpoint",
                        lambda *given, **options: calls.append(given) or checkpoint(*given, **options))  # fmt: skip
    found = gradients(fresh, ids)
    assert len(calls) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    fresh.gradient_checkpointing_disable()
    gradients(fresh, ids)
    assert len(calls) == 2


def check_same(model, other, ids):
    """Compare weights bit for bit, and logits up to the order of sums.

    On some CPUs that order depends on where weights begin in memory. transformers leaves them in the mapped file; a
    copy begins at a multiple of 64 bytes.
    """
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.cpu(), others[name]), name
    torch.testing.assert_close(model(ids.to(model.device)).logits.cpu(), other(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_are_saved_and_loaded(tmp_path, prepared, ids, tied):
    huggingface.export_run(untrained_run(tmp_path / "run", prepared, tie_embeddings=tied), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    before, embedding = model(ids).logits, model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(320)
    assert torch.equal(model.get_input_embeddings().weight[:288], embedding)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    after = model(ids, labels=ids)
    assert after.logits.shape[-1] == 320 and after.loss.isfinite()
    torch.testing.assert_close(after.logits[..., :288], before)
    model.save_pretrained(tmp_path / "larger")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "larger")
    check_same(again, model, ids)
    assert again.config.vocab_size == 320


def test_transformers_names_of_settings_change_the_model(exported):
    """In ``from_pretrained``, and in the config of a model without weights."""
    untied = AutoModelForCausalLM.from_pretrained(exported / "hf", tie_word_embeddings=False)
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
    shorter = AutoModelForCausalLM.from_pretrained(exported / "hf", num_hidden_layers=1)
    assert len(shorter.model.blocks) == 1
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(exported / "hf", vocab_size=300)
    shorter.config.num_hidden_layers = 3
    assert len(AutoModelForCausalLM.from_config(shorter.config).model.blocks) == 3


def test_a_head_that_was_untied_stays_so(fresh, tokenizer, ids, tmp_path):
    """As peft leaves a model that it merged with modules_to_save."""
    fresh.config.tie_word_embeddings = False
    fresh.get_output_embeddings().weight = nn.Parameter(2 * fresh.get_output_embeddings().weight.detach())
    fresh.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    check_same(again, fresh, ids)
    assert not again.config.tie_word_embeddings
    huggingface.import_run(tmp_path / "hf", tmp_path / "run")
    torch.testing.assert_close(load_run(tmp_path / "run").model(ids)[0], fresh(ids).logits)


# ----- saving and loading


def test_saved_again_a_folder_is_still_whole(exported, hub, tokenizer, ids, tmp_path):
    """In one file or several, code, weights and tokenizer are there: transformers and titans import load the folder."""
    for name, options in (("one", {}), ("shards", {"max_shard_size": "5KB"})):
        hub.save_pretrained(tmp_path / name, **options)
        tokenizer.save_pretrained(tmp_path / name)
        code = {path.name: path.read_text() for path in (exported / "hf").glob("*.py")}
        assert {path.name: path.read_text() for path in (tmp_path / name).glob("*.py")} == code
        check_same(AutoModelForCausalLM.from_pretrained(tmp_path / name), hub, ids)
        assert AutoTokenizer.from_pretrained(tmp_path / name)("abc </s>") == tokenizer("abc </s>")
        huggingface.import_run(tmp_path / name, tmp_path / f"{name}-run")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def test_modeling_names_all_files_that_come_along(exported):
    """Before version 5.9, transformers copies only the files that modeling_titans.py itself imports."""
    text = (exported / "hf/modeling_titans.py").read_text()
    for path in (exported / "hf").glob("titans_pt*.py"):
        assert f"from .{path.stem} import" in text


def test_weights_that_a_folder_lacks_begin_as_an_untrained_models(exported, tmp_path):
    shutil.copytree(exported / "hf", tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    lost = [name for name in weights if "norm" in name or "persistent" in name or "embedding" in name]
    save_file({name: w for name, w in weights.items() if name not in lost}, tmp_path / "hf/model.safetensors",
              {"format": "pt"})  # fmt: skip
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert set(found["missing_keys"]) == {*lost, "model.head.weight"}  # tied: both or neither
    assert model.model.head.weight is model.model.embedding.weight
    fresh = AutoModelForCausalLM.from_config(model.config).state_dict()
    for name, weight in model.state_dict().items():
        if name in lost and "norm" in name:
            assert torch.equal(weight, fresh[name]), name
        elif name in lost:
            assert weight.std().item() == pytest.approx(fresh[name].std().item(), rel=0.5), name
        elif name != "model.head.weight":
            assert torch.equal(weight, weights[name]), name
    with pytest.raises(UserError, match="its weights are not those of the model"):
        huggingface.import_run(tmp_path / "hf", tmp_path / "back")


def test_what_rises_in_training_has_risen_in_a_model_that_had_none_of_ours():
    tree = {"mixers": ["liza", "ttt_mlp"], "vocab_size": 20, "d_model": 16, "n_layers": 2, "n_heads": 2,
            "liza": {"mix": 0.5, "mix_warmup": 0.2}, "ttt_mlp": {"head_width": 8, "base_lr_warmup": 0.2}}  # fmt: skip
    for step, share in ((0, 1.0), (10, 0.5), (100, 1.0)):
        config = huggingface.TitansConfig({"model": tree, "train": {"max_steps": 100}}, step=step)
        liza, ttt = huggingface.TitansForCausalLM(config).model.blocks.mixers
        assert float(liza.mix) == pytest.approx(0.5 * share)
        assert float(ttt.ttt.risen) == pytest.approx(0.1 + 0.9 * share)


def test_bf16_placement_and_copies(exported, hub, ids):
    half = AutoModelForCausalLM.from_pretrained(exported / "hf", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half(ids).logits.float(), hub(ids).logits, atol=0.15, rtol=0.05)
    assert half.generate(ids, max_new_tokens=3, num_beams=2).shape[1] <= 16
    for twin in (copy.deepcopy(hub), pickle.loads(pickle.dumps(hub))):
        check_same(twin, hub, ids)
    pytest.importorskip("accelerate")
    check_same(AutoModelForCausalLM.from_pretrained(exported / "hf", device_map="auto"), hub, ids)


def test_a_folder_of_the_trainer_gives_states(fresh, ids, tmp_path):
    """The Trainer sets use_cache to False, and saves."""
    fresh.config.use_cache = False
    assert fresh(ids).state is None and fresh(ids[:, 6:], state=fresh(ids[:, :6], use_cache=True).state).state
    fresh.save_pretrained(tmp_path / "hf")
    assert not fresh.config.use_cache
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).state is not None


def test_checkpointing_repeats_random_draws(fresh, ids):
    fresh.train()
    for block in fresh.model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, given: (torch.nn.functional.dropout(given[0], 0.5),))
    found = []
    for switch in (fresh.gradient_checkpointing_disable, fresh.gradient_checkpointing_enable):
        switch()
        torch.manual_seed(0)
        fresh.zero_grad()
        fresh(ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in fresh.parameters() if p.grad is not None])
    for plain, repeated in zip(*found, strict=True):
        torch.testing.assert_close(repeated, plain)


def test_padding_alone_has_no_loss(hub, ids):
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    loss = hub(ids, labels=torch.full_like(ids, -100), attention_mask=mask, num_items_in_batch=5).loss
    assert loss == 0


def test_blocks_keep_the_name_of_their_class(fresh, ids):
    """FSDP and device_map look for blocks by this name."""
    fresh.generate(ids, max_new_tokens=2, do_sample=False)
    assert {type(block).__name__ for block in fresh.model.blocks} == {"Block"}
    assert type(pickle.loads(pickle.dumps(fresh)).model.blocks[0]) is type(fresh.model.blocks[0])


# ----- the tokenizer


def test_decoding_shows_control_tokens_unless_they_are_skipped(tokenizer):
    ids = tokenizer("abc dea")["input_ids"]
    marked = [1, *ids, tokenizer.eos_token_id]
    assert tokenizer.decode(marked) == "<s>abc dea</s>"
    assert tokenizer.decode(marked, skip_special_tokens=True) == "abc dea"
    assert tokenizer.decode(tokenizer.eos_token_id) == tokenizer.eos_token == "</s>"
    assert tokenizer.batch_decode([ids, marked], skip_special_tokens=True) == ["abc dea"] * 2
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("label", [-100, 10**6])
def test_an_id_without_a_token_is_not_decoded(tokenizer, label):
    with pytest.raises(IndexError, match=f"id {label}: not one of the .* tokens; leave out labels of -100"):
        tokenizer.decode([5, label])


def test_new_tokens_are_refused_and_old_ones_are_not(exported, tokenizer):
    folder = exported / "hf"
    for change in (lambda: tokenizer.add_tokens(["<new>"]),
                   lambda: tokenizer.add_special_tokens({"pad_token": "<new>"}),
                   lambda: setattr(tokenizer, "pad_token", "<new>"),
                   lambda: AutoTokenizer.from_pretrained(folder, pad_token="<new>")):  # fmt: skip
        with pytest.raises(ValueError, match="<new>: no token of this vocabulary"):
            change()
    assert len(tokenizer) == tokenizer.vocab_size and tokenizer.convert_tokens_to_ids("<new>") is None
    tokenizer.add_special_tokens({"pad_token": "<unk>"})
    assert tokenizer(["abc", "a"], padding=True)["input_ids"][1][:2] == [0, 0]


def test_no_text_is_too_long_and_padding_to_the_limit_is_possible(tokenizer):
    assert tokenizer.model_max_length == 1 << 20
    assert pickle.loads(pickle.dumps(tokenizer))("abc") == tokenizer("abc")
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])


def test_two_tokenizers_in_a_folder_are_one_too_many(exported, tmp_path):
    shutil.copytree(exported / "hf", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="one of them is another model's; delete it"):
        AutoTokenizer.from_pretrained(tmp_path / "hf")
