"""Hugging Face Trainer: a small language model on text of the Python installation; the target is docstrings."""

import ast
import pathlib
import sysconfig
import tempfile
import unicodedata

import datasets
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from mixwell.integrations.transformers import MixerTrainer

STEPS, LENGTH = 80, 64


def rows(text: str, most: int) -> list[list[int]]:
    """Text as bytes, split into rows."""
    data = text.encode()[: most * LENGTH]
    return [list(data[i : i + LENGTH]) for i in range(0, len(data) - LENGTH, LENGTH)]


code, docs = "", ""
for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    source = path.read_text(encoding="utf-8", errors="replace")
    code += source
    documented = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    docs += "\n".join(ast.get_docstring(node) or "" for node in documented)
names = "\n".join(unicodedata.name(chr(i), "") for i in range(32, 60_000))
noise = "".join(chr(33 + hash((i, 7)) % 90) for i in range(300_000))

texts = {"code": code, "names": names, "noise": noise}
train = datasets.Dataset.from_list(
    [{"input_ids": row, "labels": row, "domain": name} for name in texts for row in rows(texts[name], 2000)]
)
wanted = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows(docs, 600)])
halves = wanted.train_test_split(0.5, seed=0)

transformers.set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
)
trainer = MixerTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=20,
        save_strategy="no",
    ),
    train_dataset=train,
    validation_dataset=halves["train"],
    eval_dataset=halves["test"],
)
trainer.train()
print(f"loss on docstrings: {trainer.evaluate()['eval_loss']:.3f}")
print("average weights:", {name: round(weight, 3) for name, weight in trainer.mixer.weights.average.items()})
