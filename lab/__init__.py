"""What a user does not run: how evidence is taken on a card. In no wheel."""
