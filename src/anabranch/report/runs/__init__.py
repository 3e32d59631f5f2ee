"""The files that commands and live models write, parse_file by what they hold."""
