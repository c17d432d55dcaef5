"""Sources, tokenization, shuffles, exact apportionment, and how rows become batches."""
