"""What fits, where each layer goes, how fast it will be, and whether the draft is worth its memory."""
