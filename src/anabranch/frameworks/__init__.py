"""Other libraries' interfaces to a DataParallel: one file each, the library imported where it is needed."""
