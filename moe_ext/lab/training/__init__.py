"""Training of the models: configuration, loop, metrics, checkpoints, paired comparisons."""
