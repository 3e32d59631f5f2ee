"""Selection in Triton kernels: what ``select.py`` does in torch operations, in a few launches for buckets on a GPU.

    reset                               empty rows: heads 0, pairs −1
    sample, sample_sums, kth_magnitude  a sample's magnitudes, and the k-th largest of them
    offer                               pack what of gradient + residual passes the threshold, by region
    add, collect, select_sums           add what arrived; list each position's sum once; pack the sums that pass
    accumulate, apply                   residual += gradient, gradient = 0; scatter what is applied into the gradient
    subtract_applied                    subtract what this rank offered and is applied from its residual
    keep_rounding_error                 add the rounding error of an owner's sums to its residual
    record_step                         counts, thresholds and the next bias
    count, tables, entries, unpack      rows as messages of fewer bytes, and back: where values are rounded

A row is a head of two int32 (a count, negative if poisoned, and a float32), then pairs: what a message in float32 is.
Kernels that select count in the head itself. A float32's bits without the sign sort as its magnitude
does, so magnitudes are compared as integers: zeros, subnormals and infinities need no special case.
``triton_exchange.py`` launches these kernels.
"""
