"""What can be set: the table of options, and the names of drafters and rules."""
