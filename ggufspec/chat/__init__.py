"""Chat on a console: a pair stays loaded and answers one message after another."""
