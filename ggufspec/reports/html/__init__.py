"""Results as a page: figures, how they are drawn, and the templates."""
