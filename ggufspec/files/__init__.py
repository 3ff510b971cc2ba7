"""Files and folders: atomic writes, bounded reads, caches."""
