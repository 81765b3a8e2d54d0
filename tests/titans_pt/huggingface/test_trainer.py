"""transformers' Trainer, and adapters, on an exported model."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from titans_pt import huggingface, parameter_groups
from titans_pt.runs.loaded import load_run

pytest.importorskip("accelerate")

TEXTS = ["abc dea fonk " * n for n in (1, 3, 2, 5, 1, 4, 2, 6)]


def trainer(exported, tokenizer, folder, **options) -> Trainer:
    """A Trainer that takes one step of plain gradient descent on TEXTS."""
    arguments = TrainingArguments(
        str(folder), max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    rows = [tokenizer(text) for text in TEXTS]
    return Trainer(
        AutoModelForCausalLM.from_pretrained(exported / "hf"), arguments, train_dataset=rows, eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), processing_class=tokenizer,
    )  # fmt: skip


@pytest.mark.thorough
def test_accumulation_and_checkpointing_change_nothing(exported, tokenizer, tmp_path):
    """The same eight texts in one batch, in four or in eight, padded on either side: the same loss, the same step."""
    found = []
    for side, rows, more in (("right", 8, {}), ("right", 2, {}), ("right", 1, {}), ("left", 8, {}),
                             ("right", 4, {"gradient_checkpointing": True})):  # fmt: skip
        tokenizer.padding_side = side
        one = trainer(exported, tokenizer, tmp_path, per_device_train_batch_size=rows,
                      gradient_accumulation_steps=8 // rows, **more)  # fmt: skip
        loss = one.train().training_loss
        found.append((loss, torch.cat([p.detach().flatten() for p in one.model.parameters()])))
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(weights, found[0][1], atol=2e-5, rtol=1e-4)
    # With padding on the left, the Trainer also counts first tokens, which nothing predicts. In parts, the step has
    # the same direction and is shorter by their share.
    tokenizer.padding_side = "left"
    parts = trainer(exported, tokenizer, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    before = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
    share = parts.train().training_loss / found[0][0]
    after = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
    assert 0.95 < share < 1
    torch.testing.assert_close(after - before, share * (found[0][1] - before), atol=2e-5, rtol=1e-4)


def test_evaluation_with_and_without_predictions(exported, tokenizer, tmp_path):
    """Predictions do not include the state, which is no tensor."""
    one = trainer(exported, tokenizer, tmp_path, per_device_eval_batch_size=8)
    collated = one.data_collator([dict(row) for row in one.eval_dataset])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(exported / "hf")(**collated)
    found = one.predict(one.eval_dataset)
    torch.testing.assert_close(torch.tensor(found.predictions), expected.logits)
    assert found.metrics["test_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    one.args.prediction_loss_only = True
    assert one.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("adapters", [False, True])
def test_smoothed_labels_are_those_of_the_next_token(exported, tokenizer, ids, adapters, tmp_path):
    one = trainer(exported, tokenizer, tmp_path, label_smoothing_factor=0.1)
    model = one.model
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    expected = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    for mode in (model.train, model.eval):
        mode()
        torch.testing.assert_close(one.compute_loss(model, {"input_ids": ids, "labels": ids.clone()}), expected)


def test_what_the_trainer_saves_is_an_exported_folder(exported, tokenizer, tmp_path):
    one = trainer(exported, tokenizer, tmp_path / "work", per_device_train_batch_size=8)
    one.train()
    one.save_model(str(tmp_path / "tuned"))
    assert (tmp_path / "tuned/modeling_titans.py").is_file()
    run = load_run(huggingface.import_run(tmp_path / "tuned", tmp_path / "run"))
    for name, weight in one.model.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name][: len(weight)], weight), name  # the run may have spare rows


def test_adapters(exported, fresh, ids):
    """LoRA on every linear layer: it trains, and generation with and without the state agrees."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(fresh, settings)
    model(ids, labels=ids).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    options = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False}
    found = [model.generate(**options, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*found)
    plain = AutoModelForCausalLM.from_pretrained(exported / "hf").generate(ids, max_new_tokens=6, do_sample=False)
    assert not torch.equal(found[0], plain)


def test_rows_with_labels_teach_where_texts_end(tokenizer, hub):
    """DataCollatorForLanguageModeling leaves out eos, which is also the padding (docs/export.md)."""
    eos = tokenizer.eos_token_id
    rows = [{"input_ids": (ids := [*tokenizer(text)["input_ids"], eos]), "labels": ids} for text in TEXTS]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows)
    assert bool((batch["labels"][:, -1] == eos).all())
    assert hub(**batch).loss.isfinite()
    plain = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": row["input_ids"]} for row in rows])
    assert not bool((plain["labels"] == eos).any())


def test_parameter_groups_keep_the_memorys_start_from_decay(hub):
    decayed = {id(p) for group in parameter_groups(hub, 0.1) if group["weight_decay"] for p in group["params"]}
    starts = [p for name, p in hub.named_parameters() if ".network." in name]
    assert starts and decayed and not any(id(p) in decayed for p in starts)
