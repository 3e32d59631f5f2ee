"""Compiled models: graphs of torch.compile, cut where buckets of gradients end."""
