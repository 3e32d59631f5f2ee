"""Links among ranks of one host of the lab that are copies in memory, in the place of torch's collectives in a rank."""
