"""Figures and reports. They need the extra ``mixwell[report]``."""
