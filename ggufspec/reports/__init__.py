"""Reports of results as tables (on the terminal, in Markdown and in CSV) and as HTML pages."""
