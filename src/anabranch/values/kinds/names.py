"""Names of the kinds of exchange that send every element of a bucket, from the most to the least faithful.

Kinds that send some elements have their density in their name ("oktopk:0.01").
"""

DENSE, BF16, INT8, INT4 = EVERY_ELEMENT = ("dense", "bf16", "int8", "int4")
COMPRESSED = EVERY_ELEMENT[1:]
AUTO = "auto"  # chooses a kind for each bucket
