"""The cost of MixerTrainer relative to transformers' Trainer, on the same number of rows of the same length.

Both train a small Llama in turns, in one process on one thread; CPU time of a whole ``train()`` after its first
step is taken: one round of T steps, with its validation gradients and weight update. Settings are the defaults.
Printed are the median and the range of the ratios of the turns.

    python bench/trainer.py [--turns 5] [--domains 4]
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import datasets
import torch
import transformers
from measure import Ratios, plain_parser
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from mixwell.integrations.transformers import MixerTrainer

LENGTH, VOCABULARY, ROWS, STEPS, HORIZON = 128, 2048, 16, 101, 100


class Clock(TrainerCallback):
    """CPU seconds from the end of the first step."""

    def __init__(self) -> None:
        self.begun = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.begun = time.process_time()


def rows(count: int, domain: str | None) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(len(domain or ""))
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator).tolist()
    named = {} if domain is None else {"domain": domain}
    return datasets.Dataset.from_list([{"input_ids": one, "labels": one, **named} for one in ids])


def seconds(kind: type[Trainer], domains: int, folder: str) -> float:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    train = datasets.concatenate_datasets([rows(160, f"d{'x' * k}") for k in range(domains)])
    clock = Clock()
    more: dict[str, Any] = {}
    if kind is MixerTrainer:
        more = {
            "validation_dataset": rows(160, None),
            "mixer": {"horizon": HORIZON, "warmup": 1},
        }
    trainer = kind(model=model, args=args, train_dataset=train, callbacks=[clock], **more)
    trainer.train()
    return time.process_time() - clock.begun


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--domains", type=int, nargs="*", default=[4, 16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        for domains in options.domains:
            ratios: list[float] = []
            for turn in range(options.turns + 1):
                plain, mixed = (seconds(kind, domains, folder) for kind in (Trainer, MixerTrainer))
                if turn:  # the first warms up
                    ratios.append(mixed / plain)
                    print(
                        f"  m = {domains}, turn {turn}: {plain:.1f} s plain, {mixed:.1f} s mixed", flush=True
                    )
            print(
                f"m = {domains}, {ROWS} x {LENGTH} tokens, T = {HORIZON}: MixerTrainer takes {Ratios(ratios)} "
                "the time of Trainer"
            )


if __name__ == "__main__":
    main()
