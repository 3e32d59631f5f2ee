"""The account of memory: what each way to train holds at every moment of a step. Arithmetic alone, without torch."""
