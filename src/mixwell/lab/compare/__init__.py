"""Methods side by side: the same problem, the same seeds, the same compute."""
