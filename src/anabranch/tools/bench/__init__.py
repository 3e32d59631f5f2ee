"""``anabranch bench``: stock DDP, its settings and hooks, and our plans, in turn on the same model and ranks."""
