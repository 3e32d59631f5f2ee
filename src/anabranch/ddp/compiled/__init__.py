"""Compiled models: graphs of torch.compile, cut where gradients shall leave."""
