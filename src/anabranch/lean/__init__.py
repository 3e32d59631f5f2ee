"""The engine of LeanDataParallel: exchanges and updates each bucket inside backward, so that no gradient lives long."""
