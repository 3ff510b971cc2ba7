"""Page of results: its figures, their drawing, and the templates."""
