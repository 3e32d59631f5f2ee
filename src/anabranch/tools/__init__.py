"""Programs on top of the library: nothing outside this folder imports them."""
