"""What a run shows in a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from mixwell.training.display import HEADER_LINES, LINE_DOMAINS, Display


def shown(console: Console, weights: dict[str, float]) -> list[str]:
    display = Display(100, tuple(weights), console=console)
    display.start_at(0, weights)
    with console.capture() as captured:
        console.print(display._drawn())
    return [line.rstrip() for line in captured.get().splitlines()]


def twenty_six() -> dict[str, float]:
    """Domains a to z of which each is heavier than the one before."""
    return {chr(ord("a") + i): (i + 1) / 351 for i in range(26)}


def test_heaviest_domains_fit_a_terminal_of_24_lines() -> None:
    lines = shown(Console(width=80, height=24, force_terminal=False), twenty_six())
    assert len(lines) < 24
    rows = [line.split()[0] for line in lines[3:-1]]
    assert rows == [chr(ord("z") - i) for i in range(24 - HEADER_LINES)]
    assert lines[-1].strip() == f"7 more, with {sum(range(1, 8)) / 351:.3f} of the weight"


def test_all_domains_are_shown_where_they_fit() -> None:
    lines = shown(Console(width=80, height=50), twenty_six())
    assert [line.split()[0] for line in lines[3:]] == [chr(ord("z") - i) for i in range(26)]


def test_line_without_terminal_names_the_heaviest() -> None:
    display = Display(100, tuple(twenty_six()), console=Console(file=io.StringIO()))
    display.start_at(0, twenty_six())
    line = display._line()
    assert f"weights z {26 / 351:.3f} y" in line
    assert f"({26 - LINE_DOMAINS} more, with " in line
