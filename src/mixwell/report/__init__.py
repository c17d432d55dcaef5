"""Figures and HTML pages from run directories and tables."""
