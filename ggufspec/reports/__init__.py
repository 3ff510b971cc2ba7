"""Reports of results: tables on the terminal, as Markdown and CSV, and HTML pages."""
