"""A cluster on one machine: hosts as network namespaces, links of a real, enforced rate, and torchrun's environment."""
