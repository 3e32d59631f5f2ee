"""The command line: verbs that read nouns and print or write one."""
