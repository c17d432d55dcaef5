"""Fine-tuning: a language model for code learns docstrings from a mixture, without forgetting code.

The first stage trains a checkpoint on code. The domains of the second stage are code, the language manual, names
of characters, and noise. The target is half docstrings and half code, of modules that are in no domain. All text
is from the Python installation.

python examples/finetune.py
"""

import pathlib
import random
import sysconfig
import tempfile
import unicodedata
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import mixwell
from mixwell.integrations.transformers import MixerTrainer
from mixwell.lab.problems.demo import split_docstrings

FIRST_STEPS, STEPS, LENGTH = 100, 60, 64


def rows(text: str, most: int) -> Any:
    """Text as bytes, split into rows."""
    data = text.encode()[: most * LENGTH]
    cut = [list(data[i : i + LENGTH]) for i in range(0, len(data) - LENGTH + 1, LENGTH)]
    return [{"input_ids": row, "labels": row} for row in cut]


def settings(steps: int, learning_rate: float) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=12,
        learning_rate=learning_rate,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )


def finetune(signal: mixwell.Signal) -> tuple[LlamaForCausalLM, mixwell.Mixer]:
    """Train the checkpoint on the mixture, with the same number of steps and rows in every call."""
    transformers.set_seed(0)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    trainer = MixerTrainer(
        model=model,
        args=settings(STEPS, learning_rate=1e-3),
        train_dataset=sources,
        validation_dataset=docs[:400] + old[:400],
        mixer={"signal": signal},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model, trainer.mixer


def loss(model: LlamaForCausalLM, unseen: Any) -> float:
    """The loss on unseen rows, in nats per byte."""
    tokens = torch.tensor([row["input_ids"] for row in unseen])
    with torch.no_grad():
        return model.eval()(input_ids=tokens, labels=tokens).loss.item()


# The domains, and the target: docs and old; the first 400 rows are for validation, the others for the test.
modules = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
parts = [
    split_docstrings(path.read_text(encoding="utf-8")) for path in random.Random(0).sample(modules, k=60)
]
code = "".join(rest for _, rest in parts[:30])
old = rows("".join(rest for _, rest in parts[30:]), most=700)
docs = rows("\n\n".join(text for found, _ in parts[30:] for text in found), most=700)
sources = {
    "code": rows(code, most=4000),
    "manual": rows("\n\n".join(topics.values()), most=4000),
    "names": rows("\n".join(unicodedata.name(chr(point), "") for point in range(32, 13_000)), most=4000),
    "noise": rows("".join(random.Random(0).choices(code, k=250_000)), most=4000),
}

# Stage one: the checkpoint.
transformers.utils.logging.disable_progress_bar()
transformers.set_seed(0)
before = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
)
trainer = Trainer(before, settings(FIRST_STEPS, learning_rate=5e-3), train_dataset=sources["code"])
trainer.remove_callback(PrinterCallback)
trainer.train()
checkpoint = tempfile.mkdtemp()
before.save_pretrained(checkpoint)

# Stage two, with uniform and with learned weights.
uniform, _ = finetune(mixwell.ConstantWeights())
learned, mixer = finetune(mixwell.Hypergradient(traces=mixwell.ProjectedTraces()))

for record in mixer.rounds:
    shown = "  ".join(f"{name} {weight:.3f}" for name, weight in record.new_weights.items())
    print(f"step {record.first_step + record.steps:3d}  {shown}")
print("average weights:", {name: round(weight, 3) for name, weight in mixer.weights.average.items()})

target: dict[str, float] = {}
print("loss on   target = (docstrings + code) / 2")
for name, model in {"before": before, "uniform": uniform, "learned": learned}.items():
    new, kept = loss(model, docs[400:]), loss(model, old[400:])
    target[name] = (new + kept) / 2
    print(f"{name:8s} {target[name]:7.3f} {new:12.3f} {kept:8.3f}")
assert target["learned"] < target["uniform"]
assert min(mixer.weights.last, key=mixer.weights.__getitem__) == "noise"
