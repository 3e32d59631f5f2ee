"""The files that commands and live models write, recognised by what they hold."""
