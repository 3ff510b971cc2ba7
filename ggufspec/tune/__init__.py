"""Search for the fastest settings of a pair by real trials."""
