"""Memory before running: the peak of each mode of training, and the largest batch that fits."""
