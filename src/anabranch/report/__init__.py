"""Reports: the nouns, and rows of plain numbers about them, as terminal tables and plots."""
