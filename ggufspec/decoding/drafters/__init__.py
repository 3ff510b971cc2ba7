"""The drafters: who guesses what the target will say."""
