"""Selection in Triton: what ``select.py`` does in torch operations, a few launches for float32 buckets on a GPU.

    blank                      empty messages: heads 0, pairs −1
    sample, sample_sums, kth   a sample's magnitudes, and the k-th largest of them
    offer                      pack what of gradient + residual passes the threshold, by region; both stay
    add, collect, take         sum what arrived; list each position's sum once; pack the sums that pass
    settle, apply, clear       residual += gradient, gradient = 0; scatter what all apply; take it off the residual
    keep                       put what rounding at the owner left over into its residual
    note                       counts, thresholds and the next threshold_bias

A message is one row: a head of two int32 (a count, negative if poisoned, and a float32), then pairs as in ``wire.py``.
The packing kernels count in the head itself. A float32's bits without the sign sort as its magnitude does, so
magnitudes are compared as integers: zeros, subnormals and infinities need no care. ``fused.py`` launches these kernels.
"""
