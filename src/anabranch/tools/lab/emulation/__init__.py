"""An emulated network: Gloo collectives on one machine that take as long as they would between hosts."""
