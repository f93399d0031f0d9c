"""The page on which people watch a run. It is for looking alone: whatever fails here, the run goes on."""
