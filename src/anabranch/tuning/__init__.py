"""Tuning of a live model: profile, measure, plan, try, choose, watch for drift, and explain."""
