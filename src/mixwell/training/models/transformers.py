"""Causal language models of the ``transformers`` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import override

from mixwell.training.models.base import MODELS, ModelConfig, Trainable, token_losses
from mixwell.utils.regular_files import expand_user
from mixwell.utils.sections import Whole


@final
@MODELS.register("transformers")
class TransformersConfig(ModelConfig):
    """A causal language model of the `transformers` library."""

    is_language_model = True

    kind: str = "transformers"
    path: str
    """A folder with a model, or (with `pretrained: false`) with only its `config.json`."""
    pretrained: bool = True
    """Start from the saved weights; otherwise from new ones."""
    context: Whole = 128
    """Tokens of a row."""

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        path = base / expand_user(self.path)
        model = self._load(path)
        size = model.config.vocab_size
        if size < vocabulary:
            raise ValueError(
                f"the model in {path} knows {size} tokens, fewer than the tokenizer's {vocabulary}; give its own "
                "tokenizer file as `tokenizer`"
            )
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and self.context > longest:
            raise ValueError(
                f"model.context is {self.context}, but the model in {path} takes at most {longest}"
            )
        return Trainable.language_model(model, _token_losses, context=self.context, vocabulary=size)

    def _load(self, path: Path) -> Any:
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                "model.kind transformers needs that library: pip install 'mixwell[transformers]'"
            ) from error
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model.path: {path} has no config.json; give the folder of a model of transformers "
                "(nothing is downloaded)"
            )
        auto = transformers.AutoModelForCausalLM
        try:
            if self.pretrained:
                model = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            else:
                found = transformers.AutoConfig.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
                model = auto.from_config(found, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model.path: cannot load a causal language model from {path}: {error}"
            ) from error
        return model.float()  # weights in half precision would lose small updates


def _token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    return token_losses(model(input_ids=rows[:, :-1], use_cache=False).logits, rows)
