"""What is written down: the versioned JSON documents, one module for each command."""
