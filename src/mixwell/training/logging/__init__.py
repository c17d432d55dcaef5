"""What a run logs, under which names, and the loggers that need no other package."""
