"""Memory before running: what each way to train holds, and the largest batch that fits."""
