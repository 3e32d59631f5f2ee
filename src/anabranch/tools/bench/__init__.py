"""Every rival and every plan of ours, measured in turn on the same model, ranks and network."""
