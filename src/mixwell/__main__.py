"""``python -m mixwell``."""

from mixwell.cli import main

main()
