"""Ok-Topk, a sparse all-reduce with error feedback, as a collective that a bucket can name."""
