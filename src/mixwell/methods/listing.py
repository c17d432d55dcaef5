"""``mixwell methods``: names, requirements, memory and papers."""

from __future__ import annotations

from typing import get_args

from mixwell import methods
from mixwell.methods.base import Method, Needs


def show(name: str | None) -> None:
    """Print all methods, or the settings of one."""
    if name is not None:
        print("\n".join(description(methods.find(name))))
        return
    known = methods.every().values()
    width = max(len(method.name) for method in known) + 2
    for method in known:
        print(f"{method.name:{width}}{method.kind:9}{method.line}")
        print(
            " " * (width + 9) + f"needs {requirements(method.needs)}; holds {method.memory}; {method.paper}"
        )
    print(
        "\n`mixwell methods NAME` lists the settings of one; `mixwell compare CONFIG` runs them side by side."
    )


def requirements(needs: Needs) -> str:
    """Return a method's requirements in words, separated by commas."""
    words = {
        "validation set": needs.validation,
        "reference model": needs.reference,
        "proxy runs": needs.proxies,
        "losses by row": needs.row_losses,
        "second derivatives": needs.second_order,
    }
    found = [word for word, so in words.items() if so]
    return ", ".join([*found, *needs.packages]) or "nothing"


def description(method: Method) -> list[str]:
    """Return the lines that describe a method and its settings."""
    lines = [
        f"{method.name} ({method.kind}): {method.line}",
        f"needs: {requirements(method.needs)}; {method.needs.domains} domains or more",
        f"holds in addition to the model: {method.memory}",
        f"paper: {method.paper}",
    ]
    fields = method.options.model_fields
    lines.append("mixer.options:" if fields else "no settings of its own")
    for key, field in fields.items():
        default = field.get_default(call_default_factory=True)
        choices = [repr(one) for one in get_args(field.annotation) if isinstance(one, str)]
        allowed = f" ({', '.join(choices)})" if choices else ""
        text = " ".join((field.description or "").split())
        lines.append(f"  {key} = {default!r}{allowed}: {text}".rstrip(": "))
    return lines
