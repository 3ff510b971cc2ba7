"""Memory, placement and speed of a pair on a machine, and whether the draft is worth its memory."""
