"""The versioned JSON documents, one module for each command."""
