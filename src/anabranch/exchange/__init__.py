"""Messages between ranks: process groups as lanes, the exchanges a bucket can name, and agreement between ranks."""
