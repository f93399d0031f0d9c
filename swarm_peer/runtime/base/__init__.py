"""The frozen weights under adapters: found on this machine, or downloaded from members that have them."""
