"""HTML page of results, with its figures, their drawing, and the templates."""
