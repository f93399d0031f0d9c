"""One stage at work: admission of microbatches, the device thread, and calls from and to other stages."""
