"""The data of stage 0: corpus, tokenizers, slices, prefetch, and the launcher of microbatches."""
