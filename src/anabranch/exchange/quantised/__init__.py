"""Quantised exchanges: every element is sent, in bfloat16, or as an integer of 8 or 4 bits with a scale per block."""
