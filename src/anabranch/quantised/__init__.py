"""Quantised exchanges: every element is sent, as an integer of 8 or 4 bits with a scale per block."""
