"""Fine-tunes an exported model with Hugging Face's Trainer. It needs titans-pt[eval].

titans export runs/quickstart --out exported
python examples/finetune_with_trainer.py exported text.txt finetuned --steps 100
"""

import argparse
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import titans_pt.huggingface  # noqa: F401  # registers the model: no code of the folder is run


def main(exported: str, text: str, out: str, steps: int = 100, length: int = 128) -> list[float]:
    """Fine-tune the model, save it to ``out``, and return the training losses."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"]
    rows = [{"input_ids": ids[n : n + length]} for n in range(0, len(ids), length)]
    arguments = TrainingArguments(
        out, max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(exported), arguments, train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
