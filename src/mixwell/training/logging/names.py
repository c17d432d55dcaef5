"""The names under which numbers are logged: the same for every tool and in every integration.

======================================  ============  ==========================================================
name                                    written       what
======================================  ============  ==========================================================
``mixwell/weight/<domain>``             round         the new weight (and, by ``mixwell run``, that of step 0)
``mixwell/hypergradient/<domain>``      round         negative: more of the domain would lower the validation loss
``mixwell/noise/<domain>``              round         standard error of the hypergradient, where it is known
``mixwell/loss/<domain>``               round         mean training loss over the round, where it was observed
``mixwell/loss/validation``             round         loss of the validation gradient's rows
``mixwell/skipped/<domain>``            round         non-finite contributions left out, where there were any
``mixwell/step_size``                   round         alpha of the update
``mixwell/measured/<what>``             round         more numbers: ``trust``, ``gain``, ``curvature``
``mixwell/rows/<domain>``               step          rows trained on so far
``mixwell/step_loss/<domain>``          step          mean training loss since the step that was logged before
``mixwell/training_loss``               step          the same, of the domains together, by their weights
``mixwell/learning_rate``               step          of the optimizer
``mixwell/evaluation/<set>``            evaluation    mean loss on fixed rows of ``validation`` (and ``test``)
======================================  ============  ==========================================================

A round ends at a step, which often is logged too, and at which the model may be evaluated. Two numbers under one
name would then be two points at one place of a chart, or one would replace the other. So a loss has three names:
over a round ``loss``, since the last logged step ``step_loss``, on fixed rows ``evaluation``. ``validation``
cannot be the name of a domain, and ``test``, which can, is only used where no domains are. No kind of name is the
folder of another, since stores that keep a file for each could not hold both.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from mixwell.mixer.records import RoundRecord

PREFIX = "mixwell"
LONGEST = 250
"""Bytes of a name that every tool takes."""

# What is neither a letter, a digit, nor one of "_", "-", ".", " "; and an underscore that would begin an escape.
_UNSAFE = r"[^\w.\- ]"
_ESCAPED = re.compile(rf"_(?=x[0-9a-f]*(?:_|{_UNSAFE}))|{_UNSAFE}")


def named(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round by their names.

    Args:
        record: an entry of ``mixer.rounds``.

    Returns:
        Values for any logger, at the step ``record.first_step + record.steps``.

    Example:
        >>> record = RoundRecord(0, 0, 10, {"web": 1.0}, {"web": -0.2}, 0.5, {"web": 1.0}, {"validation": 2.5})
        >>> named(record)  # doctest: +NORMALIZE_WHITESPACE
        {'mixwell/weight/web': 1.0, 'mixwell/hypergradient/web': -0.2, 'mixwell/loss/validation': 2.5,
         'mixwell/step_size': 0.5}
    """
    return {
        **_each("weight", record.new_weights),
        **_each("hypergradient", record.scores),
        **_each("noise", record.noise),
        **_each("loss", record.losses),
        **_each("skipped", record.skipped),
        **_each("measured", record.measured),
        f"{PREFIX}/step_size": float(record.step_size),
    }


def named_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights by their names, where there is no round, such as before the first."""
    return _each("weight", weights)


def named_step(
    *,
    losses: Mapping[str, float] | None = None,
    rows: Mapping[str, int] | None = None,
    loss: float | None = None,
    learning_rate: float | None = None,
) -> dict[str, float]:
    """The numbers of a training step by their names.

    Args:
        losses: mean loss by domain since the step that was logged before.
        rows: rows trained on so far, by domain.
        loss: the mean of the domains' losses by their weights.

    Example:
        >>> named_step(losses={"web": 3.0}, rows={"web": 640})
        {'mixwell/step_loss/web': 3.0, 'mixwell/rows/web': 640.0}
    """
    values = {**_each("step_loss", losses or {}), **_each("rows", rows or {})}
    alone = {"training_loss": loss, "learning_rate": learning_rate}
    return values | {f"{PREFIX}/{kind}": float(one) for kind, one in alone.items() if one is not None}


def named_evaluation(losses: Mapping[str, float]) -> dict[str, float]:
    """The losses of an evaluation by their names.

    Args:
        losses: by set of rows, such as ``validation``.
    """
    return _each("evaluation", losses)


def portable(name: str) -> str:
    r"""A name that a tool with narrow rules takes, different for different names.

    MLflow allows letters, digits and ``_-.: /``, nothing that is a path to elsewhere, and 250 characters. What it
    does not allow becomes ``_x<code>_`` with the number of the character in hexadecimal; so do slashes and colons
    in the name of a domain, which stores on disk take for folders and drives. A name that is too long is cut, and
    ends with a digest of the whole.

    Args:
        name: any name, such as one of :func:`named`.

    Returns:
        The name itself where it is allowed.

    Example:
        >>> portable("mixwell/weight/web"), portable("mixwell/weight/C++"), portable("mixwell/weight/arxiv/math")
        ('mixwell/weight/web', 'mixwell/weight/C_x2b__x2b_', 'mixwell/weight/arxiv_x2f_math')
    """
    # In names of ours the first two parts are a kind, the rest is a domain, slashes and all.
    parts = name.split("/", 2) if name.startswith(f"{PREFIX}/") else name.split("/")
    whole = "/".join(map(_portable_part, parts))
    if len(whole.encode()) <= LONGEST:
        return whole
    digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    return whole.encode()[: LONGEST - len(digest) - 1].decode(errors="ignore") + "-" + digest


def _portable_part(part: str) -> str:
    if part == "":
        return "_x_"
    if part in (".", ".."):
        return _escape(".") * len(part)
    return _ESCAPED.sub(lambda found: _escape(found[0]), part)


def _escape(character: str) -> str:
    return f"_x{ord(character):x}_"


def _each(kind: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"{PREFIX}/{kind}/{name}": float(number) for name, number in numbers.items()}
