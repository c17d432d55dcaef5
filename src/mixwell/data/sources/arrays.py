"""Rows that need no tokenizer: token numbers, tensors, and datasets that Python code makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field
from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.data.sources.base import SOURCES, LoadContext, SourceConfig
from mixwell.utils.entry_points import call_entry_point
from mixwell.utils.regular_files import expand_user

if TYPE_CHECKING:
    from mixwell.data.datasets import IndexedDataset


@final
@SOURCES.register("tokens")
class TokensConfig(SourceConfig):
    """Token numbers in a file, which is read in place and never copied."""

    tokens: str
    """A `.npy` file, or a raw `.bin` file with `dtype`."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """The type of the numbers in a raw file."""

    @override
    def location(self, base: Path) -> str | None:
        return paths.single_location(self.tokens, base)

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        from mixwell.data import tokenization
        from mixwell.data.datasets import TokenRows

        path = context.base / expand_user(self.tokens)
        tokens = tokenization.open_tokens(path, dtype=self.dtype, vocabulary=context.vocabulary or 2**31)
        return TokenRows(tokens, length=context.row_length)


@final
@SOURCES.register("tensors")
class TensorsConfig(SourceConfig):
    """Tensors in a file."""

    tensors: str
    """A safetensors file with `inputs` and `targets`."""

    @override
    def location(self, base: Path) -> str | None:
        return paths.single_location(self.tensors, base)

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from mixwell.data.datasets import TensorRows

        path = context.base / expand_user(self.tensors)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file ({error})") from error
        missing = [name for name in ("inputs", "targets") if name not in tensors]
        if missing:
            raise ValueError(
                f"{path} has no tensor {' and no '.join(missing)}; it has {', '.join(sorted(tensors))}"
            )
        return TensorRows(tensors["inputs"], tensors["targets"])


@final
@SOURCES.register("python")
class PythonSourceConfig(SourceConfig):
    """A dataset that a Python function makes."""

    python: str
    """`module:function`; it is called with `arguments` and returns a PyTorch dataset or tensors."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        from mixwell.data.datasets import as_rows

        return as_rows(call_entry_point(self.python, self.arguments, base=context.base, key="python"))


@final
@SOURCES.register("given")
class GivenSourceConfig(SourceConfig):
    """Data that were passed to `mixwell.train`."""

    given: str
    """The name of their class."""

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        raise ValueError("these data were passed to mixwell.train: continue with mixwell.train from there")
