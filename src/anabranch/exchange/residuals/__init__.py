"""Residuals: what was not sent in a step and is added to the next one."""
