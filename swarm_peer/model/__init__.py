"""From a transformers config to the stages of a model, their training and their export."""
