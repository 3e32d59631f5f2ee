"""The command line: one file per verb, each reading nouns and printing or writing one."""
