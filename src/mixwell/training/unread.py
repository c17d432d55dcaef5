"""Settings of the mixer that the chosen method does not read."""

from __future__ import annotations

from mixwell import methods
from mixwell.hypergradient.traces import TRACES
from mixwell.methods.base import OPTIONAL_SETTINGS
from mixwell.training.config import Config


def unread_settings(config: Config) -> list[str]:
    """Return the settings that differ from their defaults and have no effect, as they are named in a config.

    Constraints that do not apply are an error of the config.
    """
    mixer = config.mixer
    method = methods.find(mixer.method)
    options = method.parse_options(mixer.options)
    unread = set(OPTIONAL_SETTINGS) - options.mixer_settings
    if not method.has_rounds:
        unread |= {"horizon", "warmup"}
    of_traces = {field for kind in TRACES.names() for field in TRACES.get(kind).model_fields}
    # Kinds may share a key.
    unread |= of_traces if "traces" in unread else of_traces - set(type(config.traces).model_fields)
    fields = type(mixer).model_fields
    found = [name for name in fields if name in unread and getattr(mixer, name) != fields[name].default]
    ignored = options.changed(options.without_effect(step_size=mixer.step_size != "auto"))
    return [f"mixer.{name}" for name in found] + [f"mixer.options.{name}" for name in ignored]


def describe_unread(config: Config) -> str | None:
    """Return a sentence that names the settings without effect, ``None`` where there are none."""
    unread = unread_settings(config)
    if not unread:
        return None
    verb = "has" if len(unread) == 1 else "have"
    return f"{', '.join(unread)} {verb} no effect: {config.mixer.method} does not read such settings"
