"""A small trainer for the tests of transformers, in a module that other processes can run.

python tests/helpers/transformers_training.py OUT ROWS ACCUMULATION
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from helpers.integration_training import prepare_process
from mixwell.integrations.transformers import MixerTrainer

VOCABULARY, LENGTH = 32, 12


def sequences(kind: str, count: int, seed: int) -> list[list[int]]:
    """Numbers that count up or down, or are random."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "noise":
        return torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator).tolist()
    begin = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    step = torch.arange(LENGTH) * (1 if kind == "up" else -1)
    return ((begin + step) % VOCABULARY).tolist()


def rows(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"input_ids": one, "labels": one} for one in sequences(kind, count, seed)]


def masked(kind: str, count: int, every: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of which every second, third, ... has no label; 0 for none."""
    made = rows(kind, count, seed)
    hidden = range(0, count, every) if every else ()
    return [{**row, "labels": [-100] * LENGTH} if place in hidden else row for place, row in enumerate(made)]


def labeled(kinds: tuple[str, ...] = ("up", "down", "noise"), count: int = 60) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{**row, "domain": kind} for kind in kinds for row in rows(kind, count)]
    )


def validation(count: int = 40) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows("up", count, seed=1))


def new_model(**settings: Any) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        **settings,
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    chosen = {
        "max_steps": 20,
        "per_device_train_batch_size": 12,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "warmup_steps": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**quiet, **chosen, **settings})


def new_trainer(
    folder: Path, *, model: Any = None, mixer: Any = None, args: Any = None, **settings: Any
) -> Any:
    return MixerTrainer(
        model=model or new_model(),
        args=arguments(folder, **(args or {})),
        **{"train_dataset": labeled(), "validation_dataset": validation(), **settings},
        mixer={"horizon": 8, **(mixer or {})},
    )


def outcome(trainer: Any) -> dict[str, Any]:
    parameters = {name: p.detach().double().sum().item() for name, p in trainer.model.named_parameters()}
    return {"weights": trainer.mixer.weights.last, "parameters": parameters, "rows": trainer._loader.taken}


def train_and_write(out: Path, rows: int, accumulation: int, checkpoint: Path | None = None) -> None:
    """Train, from a checkpoint if one is given, and write the outcome to ``out``."""
    chosen = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    made = new_trainer(out, args={**chosen, "save_strategy": "steps", "save_steps": 7})
    made.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if made.is_world_process_zero():
        written = {**outcome(made), "processes": made.args.world_size}
        Path(out, "outcome.json").write_text(json.dumps(written))


def train_in_process(*args: Any) -> None:
    """Do the same in one of several processes."""
    prepare_process()
    train_and_write(*args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_and_write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    # A process group that is destroyed at exit while the wrapped model lives aborts now and then.
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
