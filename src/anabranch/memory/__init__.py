"""Training whose buffers exist only while they are needed, and the account of what memory holds."""
