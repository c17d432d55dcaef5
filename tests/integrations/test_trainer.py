"""transformers' Trainer, mixing."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import jsonschema
import numpy as np
import pytest
import torch
import torch._dynamo
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import mixwell
from helpers import transformers_training
from helpers import transformers_training as trainer_work
from helpers.distributed_training import in_processes
from helpers.transformers_training import (
    LENGTH,
    labeled,
    new_model,
    new_trainer,
    outcome,
    rows,
    train_and_write,
    train_in_process,
    validation,
)
from mixwell.hypergradient.capture.layer_rules import NormRule, rule_for
from mixwell.integrations.transformers import MixerTrainer
from mixwell.integrations.transformers import row_losses as losses_of
from mixwell.training import mixture_file

WORK = Path(transformers_training.__file__)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def history(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_learns_logs_and_writes_mixture(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, args={"max_steps": 40})
    trainer.train()
    assert trainer.mixer.weights["up"] > 0.6
    assert [record.steps for record in trainer.mixer.rounds] == [8] * 5
    assert len(history(trainer, "mixwell/hypergradient/up")) == 5
    assert len(history(trainer, "mixwell/step_loss/noise")) == 8
    assert history(trainer, "mixwell/weight/up")[-1] == trainer.mixer.weights["up"]
    seen = {name: history(trainer, f"mixwell/rows/{name}")[-1] for name in ("up", "down", "noise")}
    assert sum(seen.values()) == 40 * 12
    assert seen["up"] > seen["noise"]
    found = mixture_file.read_mixture(tmp_path)
    jsonschema.validate(found, mixture_file.schema())
    assert found["weights"]["last"] == trainer.mixer.weights.last
    assert found["rows"] == {"available": {"down": 60, "noise": 60, "up": 60}, "trained_on": seen}
    assert found["finished"]


class _Seen(TrainerCallback):
    """Keeps the learning rates of the steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_matches_plain_loop(accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches in a loop of our own: the same parameters and hypergradients, schedule and clipping too."""
    seen = _Seen()
    settings = {
        "per_device_train_batch_size": 12 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": 0.7,
    }
    chosen = {**settings, "weight_decay": 0.0}
    trainer = new_trainer(tmp_path, args=chosen, callbacks=[seen], validation_rows=40)
    batches: list[tuple[dict[str, Any], mixwell.MixtureBatch]] = []
    step = trainer.training_step

    def watched(model: nn.Module, inputs: dict[str, Any], items: Any = None) -> Tensor:
        tensors = {key: value.clone() for key, value in inputs.items()}
        batches.append((tensors, trainer._batches[0]))
        return step(model, inputs, items)

    monkeypatch.setattr(trainer, "training_step", watched)
    trainer.train()

    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(
        model, optimizer, ["down", "noise", "up"], budget=20, horizon=8, signal=signal, clip_norm=0.7
    )
    wanted = trainer._collator("evaluation")(list(validation()))
    assert len(wanted["labels"]) == 40  # all of them, so that their order does not matter
    for number, (inputs, mixture_batch) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = seen.rates[mixer.steps_done]
        with mixer.batch(mixture_batch) as batch:
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="none"
            )
            batch.weighted_loss(losses.view(len(logits), -1)).backward()
        if (number + 1) % accumulation:
            continue
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(**wanted).loss.backward()
    assert len(set(seen.rates)) > 10
    for own, other in zip(mixer.rounds, trainer.mixer.rounds, strict=True):
        np.testing.assert_allclose(
            list(own.scores.values()), list(other.scores.values()), rtol=2e-3, atol=1e-6
        )
        assert other.losses["validation"] > 0
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def streams() -> dict[str, Any]:
    made = {name: datasets.Dataset.from_list(rows(name, 50)) for name in ("up", "down", "noise")}
    return {name: one.to_iterable_dataset(num_shards=2) for name, one in made.items()}


class _Shaken:
    """A collator that is random, as those of masked language models are."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        labels = ids.clone()
        ids[torch.rand(ids.shape) < 0.1] = 0
        return {"input_ids": ids, "labels": labels}


CASES: dict[str, dict[str, Any]] = {
    "by column": {},
    "by epochs": {"args": {"max_steps": -1, "num_train_epochs": 1.4}},
    "accumulation": {"args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}},
    "workers": {"args": {"dataloader_num_workers": 2}},
    "streams": {"train_dataset": streams, "validation_dataset": lambda: streams()["up"]},
    "random": {"data_collator": _Shaken, "model": lambda: new_model(attention_dropout=0.2)},
}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bit_for_bit(case: str, tmp_path: Path) -> None:
    def trainer() -> Any:
        chosen = {key: make() if callable(make) else make for key, make in CASES[case].items()}
        saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": False}
        arguments: Any = chosen.pop("args", {})
        return new_trainer(tmp_path, **chosen, args={**arguments, **saving})

    whole = trainer()
    whole.train()
    expected = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    for step in (3, 6, 12):  # in the middle of the first round, between two validation points, in the second
        resumed = trainer()
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.mixer.rounds == whole.mixer.rounds
        assert resumed.mixer.weights.last == whole.mixer.weights.last
        assert outcome(resumed)["rows"] == outcome(whole)["rows"]
        for name, parameter in resumed.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name


def launch(folder: Path, processes: int, *arguments: object) -> None:
    """Train with `accelerate launch`."""
    words = f"--num_machines 1 --dynamo_backend no --mixed_precision no --num_processes {processes}"
    words += " --multi_gpu --main_process_port 0"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *words.split(),
            str(WORK),
            str(folder),
            *map(str, arguments),
        ],
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(WORK.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_ranks_match_one_and_resume(tmp_path: Path) -> None:
    """`accelerate launch`: 2 processes x 2 micro-batches x 3 rows are the 12 rows that one takes at once."""

    def written(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / name / "outcome.json").read_text())

    train_and_write(tmp_path / "alone", 12, 1)
    launch(tmp_path / "both", 2, 3, 2)
    alone, both = written("alone"), written("both")
    assert (alone["processes"], both["processes"]) == (1, 2)
    assert both["rows"] == alone["rows"]
    for key in ("weights", "parameters"):
        np.testing.assert_allclose(list(both[key].values()), list(alone[key].values()), rtol=1e-3, atol=1e-4)
    checkpoint = tmp_path / "both" / "checkpoint-7"
    in_processes(train_in_process, tmp_path / "again", 3, 2, checkpoint)
    assert written("again") == both
    train_and_write(tmp_path / "fewer", 12, 1, checkpoint)
    fewer = written("fewer")
    assert fewer["rows"] == both["rows"]
    for key in ("weights", "parameters"):
        np.testing.assert_allclose(list(fewer[key].values()), list(both[key].values()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama.modeling_llama.LlamaRMSNorm", "gemma.modeling_gemma.GemmaRMSNorm"])
def test_transformers_norm_layers_have_rules(kind: str) -> None:
    module, name = kind.rsplit(".", 1)
    made = getattr(importlib.import_module(f"transformers.models.{module}"), name)(8)
    assert isinstance(rule_for(made, {"weight": 0}), NormRule)


# ----------------------------------------------------------------------------------------------- losses of rows

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(kind: str, **settings: Any) -> Any:
    config = transformers.BertConfig(vocab_size=32, max_position_embeddings=16, **TINY, **settings)
    return getattr(transformers, kind)(config).eval()


def classes(shape: tuple[int, ...], count: int = 3) -> Tensor:
    return torch.randint(0, count, shape)


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (new_model, lambda: classes((4, LENGTH))),
        (lambda: bert("BertForMaskedLM"), lambda: classes((4, LENGTH))),
        (lambda: bert("BertForTokenClassification", num_labels=3), lambda: classes((4, LENGTH))),
        (lambda: bert("BertForSequenceClassification", num_labels=3), lambda: classes((4,))),
        (lambda: bert("BertForSequenceClassification", num_labels=1), lambda: torch.randn(4)),
        (lambda: bert("BertForSequenceClassification", num_labels=3), lambda: classes((4, 3), 2).float()),
    ],
)
def test_row_losses_match_model_loss(make: Any, labels: Any) -> None:
    model = make().eval()
    targets = labels()
    if targets.dim() == 2 and targets.dtype == torch.int64:
        targets[1, 2:] = -100  # padding
    inputs = {"input_ids": torch.randint(0, 32, (4, LENGTH)), "labels": targets}
    losses_of.check_model_loss(model, model.loss_type, inputs)
    for row in range(4):
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        found = losses_of.parts_of(model, model.loss_type, inputs).means()[row]
        torch.testing.assert_close(found, model(**one).loss.reshape(()), rtol=1e-5, atol=1e-6)


def test_additional_model_loss_is_detected(tmp_path: Path) -> None:
    class WithMoreForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss + 1.0
            return outputs

    model = WithMoreForCausalLM(new_model().config)
    with pytest.raises(ValueError, match="so it is not the plain loss of .*; give row_losses=f"):
        new_trainer(tmp_path, model=model).train()


def test_row_losses_can_be_passed(tmp_path: Path) -> None:
    calls: list[int] = []

    def own(model: nn.Module, inputs: Any) -> Tensor:
        calls.append(len(inputs["input_ids"]))
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        each = nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="none"
        )
        return each.view(len(logits), -1).mean(dim=1)

    plain, given = new_trainer(tmp_path), new_trainer(tmp_path, row_losses=own)
    plain.train()
    given.train()
    assert calls.count(12) == 20  # the others are validation batches
    # A twentieth of a round's rows would be less than a batch of 12, which 4 points share; the last round has 2.
    assert calls.count(3) == 4 + 4 + 2
    assert given.mixer.weights.last == pytest.approx(plain.mixer.weights.last, rel=1e-4)


# ----------------------------------------------------------------------------------------------- bad input


def test_invalid_data_raise(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="train_dataset has no column 'domain' .* its columns are input_ids, labels"
    ):
        new_trainer(tmp_path, train_dataset=validation())
    with pytest.raises(ValueError, match="the rows of train_dataset have no 'domain'"):
        new_trainer(tmp_path, train_dataset=rows("up", 3))
    with pytest.raises(ValueError, match="noise: the dataset is empty"):
        new_trainer(tmp_path, train_dataset={"up": rows("up", 3), "noise": []})
    with pytest.raises(ValueError, match="train_dataset is empty"):
        new_trainer(tmp_path, train_dataset=[])
    with pytest.raises(ValueError, match="a stream cannot be sorted by domain before it is read"):
        new_trainer(tmp_path, train_dataset=labeled().to_iterable_dataset())
    with pytest.raises(ValueError, match=r"row 2 of train_dataset has no 'domain' \(and 0 more\)"):
        holes = [{**row, "domain": name} for row, name in zip(rows("up", 3), ["a", "b", None], strict=True)]
        new_trainer(tmp_path, train_dataset=datasets.Dataset.from_list(holes))
    with pytest.raises(ValueError, match="validation_dataset is empty; give it at least one row"):
        new_trainer(tmp_path, validation_dataset=validation().select([]))
    with pytest.raises(ValueError, match="validation_dataset is missing: it says what the weights"):
        new_trainer(tmp_path, validation_dataset=None)
    with pytest.raises(ValueError, match="validation_rows must be at least 1, got 0"):
        new_trainer(tmp_path, validation_rows=0)


def test_domains_from_column_or_mapping(tmp_path: Path) -> None:
    plain = [{**row, "source": kind} for kind in ("b", "a") for row in rows("up", 3)]
    assert list(new_trainer(tmp_path, train_dataset=plain, domain_column="source")._domains) == ["a", "b"]
    classed = labeled().cast_column("domain", datasets.ClassLabel(names=["up", "none", "noise", "down"]))
    made = new_trainer(tmp_path, train_dataset=classed)
    assert list(made._domains) == ["up", "noise", "down"]
    assert transformers_training.sequences("up", 1, 0)[0] == made._domains["up"][0]["input_ids"]
    nameless = labeled().cast_column("domain", datasets.ClassLabel(names=["up", "noise", "down"]))
    nameless = nameless.map(
        lambda row, place: {"domain": -1 if place == 7 else row["domain"]}, with_indices=True
    )
    with pytest.raises(ValueError, match=r"row 7 of train_dataset has no 'domain' \(and 0 more\)"):
        new_trainer(tmp_path, train_dataset=nameless)


def test_gpt2_is_a_causal_language_model(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    trainer = new_trainer(tmp_path, model=transformers.GPT2LMHeadModel(config))
    trainer.train()  # without a warning: the traces have all parameters, positions among them
    assert trainer.mixer.weights["up"] > trainer.mixer.weights["noise"]


@pytest.mark.parametrize("epochs", [1.0, 2.0])
def test_epoch_caps_hold(epochs: float, tmp_path: Path) -> None:
    cap = mixwell.EpochCap({"down": 60, "noise": 60, "up": 60}, {"up": epochs}, batch_size=12, budget=20)
    trainer = new_trainer(tmp_path, mixer={"constraints": [cap]})
    trainer.train()
    assert 0 < outcome(trainer)["rows"]["up"] <= 60 * epochs


def test_small_domain_is_limited_unless_constraints_given(tmp_path: Path) -> None:
    few = {"up": rows("up", 4), "noise": rows("noise", 4000)}
    trainer = new_trainer(tmp_path / "default", train_dataset=few)
    trainer.train()
    limit = 16 * 4 / (12 * 20)  # of all its 20 steps of 12 rows
    assert trainer.mixer.weights.history[0][list(few).index("up")] == pytest.approx(limit)
    trainer = new_trainer(tmp_path / "given", train_dataset=few, mixer={"constraints": []})
    trainer.train()
    assert trainer.mixer.weights.history[0].tolist() == [0.5, 0.5]


def test_evaluation_and_checkpointing(tmp_path: Path) -> None:
    saving = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 5}
    chosen = {**saving, "load_best_model_at_end": True, "save_total_limit": 1, "gradient_checkpointing": True}
    trainer = new_trainer(tmp_path, args={**chosen, "bf16": True}, eval_dataset=validation(8))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert (Path(trainer.state.best_model_checkpoint) / "mixer.safetensors").exists()


def test_unknown_domains_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'books'"):
        new_trainer(tmp_path, mixer={"weights": {"up": 1, "down": 1, "noise": 1, "books": 1}}).train()


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_model_trains_as_the_plain_one(tmp_path: Path) -> None:
    found = []
    for name, args in {
        "plain": {},
        "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    }.items():
        trainer = new_trainer(tmp_path / name, args=args, mixer={"signal": _thinned()})
        trainer.train()
        found.append(outcome(trainer))
        wrapped = isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
        assert wrapped == (name == "compiled")
    assert found[0]["rows"] == found[1]["rows"]
    for kind in ("weights", "parameters"):
        assert found[1][kind] == pytest.approx(found[0][kind], rel=1e-2)


def _thinned() -> mixwell.Hypergradient:
    return mixwell.Hypergradient(traces=mixwell.ProjectedTraces(), trace_every=3)


def test_unsupported_settings_raise(tmp_path: Path) -> None:
    class Own(MixerTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ValueError, match="compute_loss gives one number for a batch"):
        Own(model=new_model(), args=transformers_training.arguments(tmp_path), train_dataset=labeled())
    with pytest.raises(ValueError, match="compute_loss_func gives one number for a batch"):
        new_trainer(tmp_path, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(ValueError, match="mixer: budget is chosen by the trainer or loop; leave it out"):
        new_trainer(tmp_path, mixer={"budget": 3})
    with pytest.raises(ValueError, match="there are no batches before training has begun"):
        next(iter(new_trainer(tmp_path).get_train_dataloader()))
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoint_of_plain_trainer_raises(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    plain = Trainer(
        model=new_model(),
        args=transformers_training.arguments(tmp_path, **saving),
        train_dataset=validation(),
    )
    plain.train()
    with pytest.raises(ValueError, match=r"has no mixing.json: it was not saved by a MixerTrainer"):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_changed_batch_size_raises(tmp_path: Path) -> None:
    new_trainer(tmp_path, args={"save_strategy": "steps", "save_steps": 4, "max_steps": 8}).train()
    with pytest.raises(ValueError, match="a step had 12 rows when the run was saved, and has 6"):
        other = new_trainer(tmp_path, args={"per_device_train_batch_size": 6, "max_steps": 8})
        other.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"(?s)budget: 8 in the state, 20 here\n.*\nTake the settings"):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


# ----------------------------------------------------------------------------------------------- a loader


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loader_matches_its_datasets(accumulation: int, tmp_path: Path) -> None:
    made = {kind: datasets.Dataset.from_list(rows(kind, 60)) for kind in ("up", "down", "noise")}
    sizes = {"per_device_train_batch_size": 12 // accumulation, "gradient_accumulation_steps": accumulation}
    found: list[dict[str, Any]] = []
    for data in (made, mixwell.MixtureLoader(made, 12, seed=42)):  # the seed of TrainingArguments
        trainer = new_trainer(tmp_path, train_dataset=data, args=sizes)
        trainer.train()
        found.append(trainer_work.outcome(trainer))
    assert found[0] == found[1]


def test_loader_of_other_batch_size_raises(tmp_path: Path) -> None:
    loader = mixwell.MixtureLoader({"up": rows("up", 60), "down": rows("down", 60)}, 24)
    with pytest.raises(ValueError, match="the loader makes steps of 24 rows, and TrainingArguments of 12"):
        new_trainer(tmp_path, train_dataset=loader).train()


def test_epoch_cap_unknown_to_loader_raises(tmp_path: Path) -> None:
    """The loader records which rows were used, so a cap of the mixer alone would never tighten."""
    data = {kind: rows(kind, 60) for kind in ("up", "down", "noise")}
    cap = mixwell.EpochCap(dict.fromkeys(data, 60), {"up": 2.0}, batch_size=12, budget=10)
    loader = mixwell.MixtureLoader(data, 12)
    with pytest.raises(ValueError, match="an EpochCap that the MixtureLoader does not know"):
        new_trainer(tmp_path, train_dataset=loader, mixer={"constraints": [cap]}).train()


def test_the_workers_end_with_the_training(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, args={"dataloader_num_workers": 1, "max_steps": 12})
    trainer.train()
    assert multiprocessing.active_children() == []


def test_a_loader_keeps_its_collate(tmp_path: Path) -> None:
    """Rows under other names, which only the loader's own function understands."""
    names = {"input_ids": "mine", "labels": "target"}

    def renamed(some: list[Any]) -> list[Any]:
        return [{names[key]: value for key, value in row.items()} for row in some]

    def collate(some: list[Any]) -> dict[str, Any]:
        return {key: torch.tensor([row[own] for row in some]) for key, own in names.items()}

    plain, wanted = {kind: rows(kind, 60) for kind in ("up", "down", "noise")}, list(validation())
    found: list[dict[str, Any]] = []
    for own in (False, True):
        made = {kind: renamed(some) if own else some for kind, some in plain.items()}
        loader = mixwell.MixtureLoader(made, 12, seed=42, collate=collate if own else None)
        trainer = new_trainer(
            tmp_path, train_dataset=loader, validation_dataset=renamed(wanted) if own else wanted
        )
        trainer.train()
        found.append(trainer_work.outcome(trainer))
    assert found[0] == found[1]
