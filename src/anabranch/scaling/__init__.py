"""Predictions over world sizes and networks: the library behind `anabranch scale`."""
