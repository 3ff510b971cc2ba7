"""Terminal chat in which a pair stays loaded and answers one message after another."""
