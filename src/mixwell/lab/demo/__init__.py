"""The embedded default: text that every Python installation has."""
