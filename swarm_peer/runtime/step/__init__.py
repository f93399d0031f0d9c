"""The end of a round: barrier, averaging, vote, optimizer step, and the handover of a leaving peer's gradient."""
