"""Where text comes from: files, tables, datasets, and strings at hand."""

from mixwell.data.sources.base import FileSource, Piece, Source
from mixwell.data.sources.huggingface import HuggingFace
from mixwell.data.sources.jsonl import JsonLines
from mixwell.data.sources.memory import Texts
from mixwell.data.sources.parquet import Parquet
from mixwell.data.sources.text import TextFiles

__all__ = ["FileSource", "HuggingFace", "JsonLines", "Parquet", "Piece", "Source", "TextFiles", "Texts"]
