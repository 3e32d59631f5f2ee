"""Tuning of a live model: profile, measure, plan, try, choose, keep, watch for drift, and explain."""
