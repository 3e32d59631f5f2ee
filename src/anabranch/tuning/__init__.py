"""The life of a DataParallel: profile, measure, plan, try, decide, watch for drift, and explain."""
