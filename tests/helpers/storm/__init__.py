"""A seeded fuzzer of everything that a user can give to the command line."""
