"""As much of hivemind's types as its adapters subclass; mypy takes everything else of it for Any."""
