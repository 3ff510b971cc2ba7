"""The console: a pair that stays loaded and answers one message after another."""
