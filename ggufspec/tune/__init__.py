"""The search for the fastest settings of a pair, with real trials."""
