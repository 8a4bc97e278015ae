"""How many users a machine serves: arrivals, a simulation of the scheduler, and its error against a real server."""
