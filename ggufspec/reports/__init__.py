"""What is told: the versioned JSON document, tables, files."""
