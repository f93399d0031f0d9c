"""The data of stage 0: corpus, tokenizers, slices, prefetch, leases, and the launcher of microbatches."""
