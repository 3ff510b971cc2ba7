"""Files that make a pair: profiles, headers, the hub's cache, and whether a draft is compatible with a target."""
