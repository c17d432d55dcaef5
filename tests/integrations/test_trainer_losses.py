"""The losses of MixerTrainer compared with those of transformers' Trainer, or computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer

from helpers.transformers_training import (
    LENGTH,
    VOCABULARY,
    arguments,
    masked,
    new_model,
    new_trainer,
    rows,
    validation,
)
from mixwell.integrations.transformers import MixerTrainer

PLAIN = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def mean_loss(model: nn.Module, inputs: dict[str, Tensor], row: int) -> Tensor:
    return model(input_ids=inputs["input_ids"][row : row + 1], labels=inputs["labels"][row : row + 1]).loss


# ---------------------------------------------------------------------------------------- rows without labels


@pytest.mark.parametrize("accumulation", [1, 3])
def test_rows_without_labels_do_not_count(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SGD step is that of the weighted means over the rows with labels, by hand; "noise" has none at all."""
    settings = {
        "per_device_train_batch_size": 12 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "optim": "sgd",
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.5,
    }
    weights = {"up": 0.5, "down": 0.3, "noise": 0.2}
    trainer = new_trainer(
        tmp_path,
        args={**PLAIN, **settings},
        mixer={"weights": weights, "constraints": [], "horizon": 1},
        train_dataset={"up": masked("up", 60, 2), "down": rows("down", 60), "noise": masked("noise", 60, 1)},
    )
    seen: list[tuple[dict[str, Tensor], list[int]]] = []
    step = trainer.training_step

    def watched(model: nn.Module, inputs: dict[str, Any], items: Any = None) -> Tensor:
        seen.append(
            ({key: value.clone() for key, value in inputs.items()}, trainer._batches[0].labels.tolist())
        )
        return step(model, inputs, items)

    monkeypatch.setattr(trainer, "training_step", watched)
    trainer.train()

    model, losses = new_model(), {name: [] for name in weights}
    for inputs, labels in seen:
        for row, number in enumerate(labels):
            if (inputs["labels"][row] != -100).any():
                losses[list(weights)[number]].append(mean_loss(model, inputs, row))
    assert 0 < len(losses["up"]) < sum(labels.count(0) for _, labels in seen)
    assert not losses["noise"]
    means = {name: torch.stack(found).mean() for name, found in losses.items() if found}
    torch.stack([weights[name] * mean for name, mean in means.items()]).sum().backward()
    for own, other in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(own - 0.5 * torch.as_tensor(own.grad), other, rtol=1e-4, atol=1e-6)
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["mixwell/step_loss/up"] == pytest.approx(means["up"].item(), rel=1e-4)
    assert "mixwell/step_loss/noise" not in logged
    assert trainer.mixer.rounds[0].losses["up"] == pytest.approx(means["up"].item(), rel=1e-4)
    assert "noise" not in trainer.mixer.rounds[0].losses


def test_masked_rows_leave_the_weights_as_without_them(tmp_path: Path) -> None:
    """Every second row of each domain without labels: about the weights and losses of the others alone."""
    found = []
    for hidden in (0, 2):
        data = {name: masked(name, 60, hidden) for name in ("up", "down", "noise")}
        trainer = new_trainer(tmp_path, args={"max_steps": 40}, train_dataset=data)
        trainer.train()
        found.append(trainer.mixer)
    plain, hidden = found
    assert hidden.rounds[0].losses["up"] == pytest.approx(plain.rounds[0].losses["up"], rel=0.05)
    assert hidden.weights["up"] == pytest.approx(plain.weights["up"], abs=0.1)


def test_validation_rows_without_labels_do_not_count(tmp_path: Path) -> None:
    wanted = masked("up", 40, 2, seed=1)
    trainer = new_trainer(
        tmp_path,
        args={**PLAIN, "learning_rate": 0.0, "max_steps": 8},
        validation_dataset=wanted,
        validation_rows=40,
    )
    trainer.train()
    model = new_model()
    batch = {key: torch.tensor([row[key] for row in wanted]) for key in ("input_ids", "labels")}
    kept = [row for row in range(40) if (batch["labels"][row] != -100).any()]
    expected = torch.stack([mean_loss(model, batch, row) for row in kept]).mean().item()
    assert len(kept) == 20
    assert trainer.mixer.rounds[0].losses["validation"] == pytest.approx(expected, rel=1e-4)


def test_validation_without_any_label_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of 100 validation batches has a label that counts"):
        new_trainer(tmp_path, validation_dataset=masked("up", 8, 1)).train()


# ------------------------------------------------------------------------------------------- compared with Trainer

FEW = 12


def both(tmp_path: Path, make: Any, *, tokens: int | None = None, **settings: Any) -> tuple[Any, Any]:
    """Train with Trainer and with MixerTrainer on one domain, all rows of it in every step.

    Args:
        tokens: the number of predicted tokens of a row, where Trainer miscounts them.
    """
    chosen = arguments(
        tmp_path, **{**PLAIN, "max_steps": 4, "logging_steps": 1, "weight_decay": 0.0, **settings}
    )
    data = datasets.Dataset.from_list(rows("up", FEW))
    plain = Trainer(model=make(), args=chosen, train_dataset=data)
    if tokens is not None:
        plain._get_num_items_in_batch = lambda samples, _: torch.tensor(  # type: ignore[method-assign]
            tokens * sum(len(batch["labels"]) for batch in samples)
        )
    mixed = MixerTrainer(
        model=make(),
        args=chosen,
        train_dataset={"up": data},
        validation_dataset=validation(8),
        mixer={"horizon": min(2, chosen.max_steps)},
    )
    plain.train()
    mixed.train()
    return plain, mixed


def logged_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(plain: Any, mixed: Any, initial: nn.Module) -> None:
    assert logged_losses(mixed) == pytest.approx(logged_losses(plain), rel=1e-4)
    moved = False
    named = zip(plain.model.named_parameters(), mixed.model.parameters(), initial.parameters(), strict=True)
    for (name, own), other, before in named:
        torch.testing.assert_close(
            own, other, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        moved |= not torch.equal(own, before)
    assert moved


def mixture_of_experts(kind: str, coefficient: float) -> Any:
    transformers.set_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "output_router_logits": True,
        "router_aux_loss_coef": coefficient,
        "intermediate_size": 32,
    }
    if kind == "Mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **shape))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**experts, **shape))


@pytest.mark.filterwarnings("ignore::UserWarning")  # experts are left out of the traces
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("coefficient", [0.001, 0.01])
def test_router_loss_is_trained_with(kind: str, coefficient: float, tmp_path: Path) -> None:
    """SGD, since Adam would hide the size of a gradient."""
    settings = {"optim": "sgd", "learning_rate": 0.5}
    plain, mixed = both(tmp_path, lambda: mixture_of_experts(kind, coefficient), **settings)
    assert_same(plain, mixed, mixture_of_experts(kind, coefficient))
    without, _ = both(tmp_path, lambda: mixture_of_experts(kind, 0.0), **settings)
    differences = [
        float((own - other).abs().max())
        for (name, own), other in zip(mixed.model.named_parameters(), without.model.parameters(), strict=True)
        if "gate" in name
    ]
    assert max(differences) > 10 * 2e-6  # so that the comparison would see it missing


def test_router_loss_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """Each micro-batch adds its part: the mean of theirs in place of a sum."""
    losses = []
    for accumulation in (1, 3):
        sizes = {
            "per_device_train_batch_size": 12 // accumulation,
            "gradient_accumulation_steps": accumulation,
        }
        _, mixed = both(tmp_path, lambda: mixture_of_experts("Mixtral", 1.0), **sizes, max_steps=1)
        losses += logged_losses(mixed)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def gpt2() -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


ADAPTERS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, task_type="CAUSAL_LM"),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, encoder_dropout=0.0, task_type="CAUSAL_LM"
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("base", [lambda: new_model(), gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_train_as_with_trainer(adapter: str, base: Any, tmp_path: Path) -> None:
    def make() -> Any:
        model = base()
        transformers.set_seed(1)
        return peft.get_peft_model(model, ADAPTERS[adapter]())

    # Trainer does not know that GPT-2 predicts no first token of a row, nor that virtual tokens predict it.
    tokens = LENGTH if adapter in ("prompt tuning", "p-tuning") else LENGTH - 1
    plain, mixed = both(tmp_path, make, tokens=tokens, learning_rate=1e-2)
    assert_same(plain, mixed, make())


def test_label_smoothing_is_that_of_trainer(tmp_path: Path) -> None:
    settings = {"optim": "sgd", "learning_rate": 0.5}  # Adam would enlarge rounding errors
    plain, mixed = both(tmp_path, new_model, label_smoothing_factor=0.2, **settings)
    assert_same(plain, mixed, new_model())


# ----------------------------------------------------------------------------------------------- settings and data


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential"])
def test_sampling_strategies_raise(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"train_sampling_strategy='{strategy}' chooses the rows of a batch"):
        new_trainer(tmp_path, args={"train_sampling_strategy": strategy})


def test_other_data_settings_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split_batches=True changes how processes share a batch"):
        new_trainer(tmp_path, args={"accelerator_config": {"split_batches": True}})
    with pytest.raises(ValueError, match="optim='lomo' updates parameters during the backward pass"):
        new_trainer(tmp_path, args={"optim": "lomo"})
    with pytest.warns(UserWarning, match="dataloader_in_order=False has no effect"):
        new_trainer(tmp_path, args={"dataloader_in_order": False})


def test_settings_of_trainer_are_followed(tmp_path: Path) -> None:
    counting = {
        "include_num_input_tokens_seen": "all",
        "neftune_noise_alpha": 5.0,
        "torch_empty_cache_steps": 2,
    }
    trainer = new_trainer(tmp_path, args={**counting, "dataloader_drop_last": True})
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 20 * 12 * 12
    quiet = new_trainer(tmp_path)
    quiet.train()
    assert logged_losses(trainer)[0] != logged_losses(quiet)[0]  # with noise on the embeddings


def test_batch_size_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(tmp_path, args={"auto_find_batch_size": True, "per_device_train_batch_size": 16})
    step = trainer.training_step

    def out_of_memory(model: nn.Module, inputs: dict[str, Any], items: Any = None) -> Tensor:
        if len(inputs["input_ids"]) > 15:
            raise RuntimeError("CUDA out of memory.")
        return step(model, inputs, items)

    monkeypatch.setattr(trainer, "training_step", out_of_memory)
    trainer.train()
    assert trainer.mixer.steps_done == 20
    assert 0 < trainer._step_rows < 16


def test_mapping_of_validation_sets_is_one_set(tmp_path: Path) -> None:
    parts = {"a": validation(10), "b": datasets.Dataset.from_list(rows("down", 30, seed=2))}
    found = []
    for wanted in (datasets.DatasetDict(**parts), datasets.concatenate_datasets(list(parts.values()))):
        trainer = new_trainer(tmp_path, validation_dataset=wanted)
        trainer.train()
        found.append(trainer.mixer.weights.last)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=r"validation_dataset\['b'\] is a stream"):
        new_trainer(tmp_path, validation_dataset={**parts, "b": parts["b"].to_iterable_dataset()})
    with pytest.raises(ValueError, match=r"validation_dataset\['b'\] is empty"):
        new_trainer(tmp_path, validation_dataset={**parts, "b": []})
    with pytest.raises(ValueError, match="validation_dataset is empty"):
        new_trainer(tmp_path, validation_dataset={})


@pytest.mark.parametrize("bar", [False, True])
def test_log_of_many_domains_is_short(bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {f"domain {number:02}": rows("up", 12, seed=number) for number in range(20)}
    settings = {
        "per_device_train_batch_size": 40,
        "max_steps": 8,
        "disable_tqdm": not bar,
        "logging_steps": 4,
    }
    trainer = new_trainer(tmp_path, train_dataset=data, args=settings)
    trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if "mixwell/weight" in line]
    assert printed
    assert max(map(len, printed)) < 1200
    assert all("(14 more)" in line for line in printed)
    last = trainer.state.log_history[-2]
    assert sum(name.startswith("mixwell/weight/") for name in last) == 20
    assert sum(value for name, value in last.items() if name.startswith("mixwell/weight/")) == pytest.approx(
        1
    )
