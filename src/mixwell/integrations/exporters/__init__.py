"""A learned mixture as static weights for another tool. Each file registers its formats in ``EXPORTERS``."""

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format, export

__all__ = ["EXPORTERS", "Entry", "Format", "export"]
