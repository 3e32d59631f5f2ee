"""Reading the files that commands and live models write; a file is recognised by its content."""
