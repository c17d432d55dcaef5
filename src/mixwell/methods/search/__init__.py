"""RegMix and Data Mixing Laws: proxies on many mixtures, a model of their losses, the best mixture."""
