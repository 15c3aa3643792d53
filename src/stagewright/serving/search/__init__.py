"""Search for the cheapest deployment of a load, by simulation."""
