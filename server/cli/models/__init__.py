"""The commands for models on this disk and on the hub: pull, models, show, rm."""
