"""What touches a live model and a process group."""
