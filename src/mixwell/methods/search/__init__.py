"""Offline methods: many proxies, a fit, a proposal."""
